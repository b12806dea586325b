"""LLaMA 1, 2, 3.x and what has its architecture: the defaults of BaseModel. InternLM has biases and Mistral a sliding
window, for which their configs ask."""

from lightllm.common.basemodel.basemodel import BaseModel


class Llama(BaseModel):
    pass
