"""Expert parallelism and tensor parallelism refuse what they cannot cut, by name and number."""

from __future__ import annotations

import pytest
import transformers as T
from model.harness import SIZES, load, make_reference

from lightllm.common.basemodel.model_config import ConfigError
from lightllm.distributed.parallel_state import ParallelState


@pytest.mark.parametrize(("ep_moe", "problem"), [(True, "num_experts 5"), (False, "moe_intermediate_size 27")])
def test_experts_that_ranks_cannot_share(tmp_path, ep_moe, problem):
    moe = dict(num_experts=5, moe_intermediate_size=27)
    make_reference(T.Qwen3MoeConfig(**SIZES, **moe, num_experts_per_tok=2, head_dim=16)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"--tp 2.*{problem}"):
        load(tmp_path, ParallelState(0, 2, ep_moe=ep_moe))
