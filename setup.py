"""Metadata, ranges that the code runs with, extras and commands; requirements.txt has the tested pins."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "lightllm/__init__.py").read_text(encoding="utf-8"), re.M)[1]

setup(
    name="lightllm",
    version=VERSION,
    description="An inference server for open language models in plain Python",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["lightllm", "lightllm.*"], exclude=["lightllm._server_shim"]), "server"],
    package_dir={"server": "lightllm/_server_shim"},
    package_data={"lightllm": ["py.typed", "common/all_kernel_configs/*/*.json", "server/pages/*.html"]},
    entry_points={"console_scripts": ["lightllm = lightllm.server.api_cli:main"]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
        "transformers>=5.17,<6",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "fastapi>=0.120",
        "uvicorn>=0.35",
        "httptools>=0.6",  # uvicorn parses requests with it: a third less CPU time per small request than h11
        "pyzmq>=27",
        "uvloop>=0.21",
        "pydantic>=2.11",
        "numpy>=2",
        "msgspec>=0.20",  # messages between processes and JSON: several times as fast as pydantic and json
        "prometheus-client>=0.20",
        "tqdm>=4.66",  # progress bars of loading and of LLM.generate
        "jinja2>=3.1",  # chat templates; transformers only has it as an extra
    ],
    extras_require={
        "grammar": ["llguidance>=1.5"],  # JSON schemas, regular expressions and grammars that outputs must match
        "xgrammar": ["xgrammar>=0.2.8"],  # the same, for --grammar_backend xgrammar
        # a trace of every request for an OpenTelemetry collector
        "tracing": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"],
        "demo": ["gguf>=0.17"],  # reads the embedded model and other GGUF files
        "bench": ["matplotlib>=3.9"],  # plots of benchmarks/
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "mypy>=1.17",
            "httpx>=0.28",
            "gguf>=0.17",
            "openai>=2",
            "schemathesis>=4",  # asks the server whatever its description allows
            "playwright>=1.50",  # drives a Chromium of the system through the pages
            "anthropic>=2",
            "jsonschema>=4.20",  # what a schema-constrained answer must satisfy
        ],
    },
)
