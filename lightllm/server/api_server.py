"""`python -m lightllm.server.api_server --model_dir DIR --tp N`: the server, started by its flags."""

import sys

from lightllm.server.api_cli import parse_server_args
from lightllm.server.api_start import serve


def main() -> None:
    sys.exit(serve(parse_server_args()))


if __name__ == "__main__":
    main()
