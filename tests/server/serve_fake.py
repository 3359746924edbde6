"""A server process over the fake engine: `python serve_fake.py PORT STEP_SECONDS GRACE`."""

import logging
import sys

from aspire.server.config import ServerConfig
from aspire.server.run import run
from aspire.testing.fake_engine import FakeEngine

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    run(FakeEngine(step_seconds=float(sys.argv[2])),
        ServerConfig(port=int(sys.argv[1]), shutdown_grace=float(sys.argv[3])))
