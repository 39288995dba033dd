"""A chat in the browser with the demo model: open it in two tabs, and both answers stream from one batch.

usage: python demos/chat.py [--model FOLDER_OR_HUB_ID] [--port 7860]     (the same as `hf-cb chat`)
"""

import sys

from hf_cb.cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
