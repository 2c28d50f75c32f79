"""What this node is and whether training can run on it.  Standard library only, quick to import."""
