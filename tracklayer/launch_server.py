"""`python -m tracklayer.launch_server --model-path MODEL`: the server, under the name that SGLang's clients start."""

from __future__ import annotations

import sys

from tracklayer.config import sleep_while_waiting
from tracklayer.server.launch import main

if __name__ == "__main__":
    sleep_while_waiting()
    sys.exit(main())
