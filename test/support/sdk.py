"""The official SDKs, pointed at a server of ours, without retries."""

import anthropic
import openai

TIMEOUT = 600.0  # seconds


def openai_sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=TIMEOUT)


def anthropic_sdk(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=TIMEOUT)
