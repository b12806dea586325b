"""LightLLM's old name: setup.py installs this folder as the top-level package `server`."""
