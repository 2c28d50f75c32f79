"""Trainyard: from a row of matrix.yaml to an image that has trained with ZeRO-3."""
