# The browser of test_jupyter.py: chromedriver, which drives a Chromium beside it.  It is built by
# `python build.py test` on the base of the first image that needs it, never enters an image, and gives a
# host no package that it did not have; Ubuntu's own chromium is a snap, which needs its store to come.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=apt.list --mount=type=secret,id=ca,mode=0444 \
    set -eux; \
    if [ -s /run/secrets/apt.conf ]; then export APT_CONFIG=/run/secrets/apt.conf; fi; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        chromium \
        chromium-driver \
        tini; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/*
# Chromium's own sandbox needs more than an ordinary container may do and is off: so not as root.
RUN useradd --create-home --uid 1000 browser
USER 1000
EXPOSE 9515
# Whoever reaches the port drives the browser: publish it on 127.0.0.1 only.
ENTRYPOINT ["tini", "--", "chromedriver", "--port=9515", "--allowed-ips=", "--allowed-origins=*"]
