"""What all tests share: no proxy and no colour gets into a child process or a client."""

import os
import signal

for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "FORCE_COLOR"):
    os.environ.pop(name, None)

# A run that is told to stop (by `timeout`, by CI) ends its child processes too: as at Ctrl-C, fixtures are torn down.
signal.signal(signal.SIGTERM, signal.default_int_handler)
