"""Tables of tuned kernels: what is shipped, what was found on this machine."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lightllm.common.basemodel.triton_kernel.skinny_linear import SkinnyConfig
from lightllm.common.basemodel.tune_products import tune_products
from lightllm.common.triton_utils import kernel_tables
from lightllm.common.triton_utils.kernel_tables import add_to_kernel_table, kernel_table

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_tables, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU 9")
    monkeypatch.setattr(kernel_tables, "_unkept", defaultdict(dict))
    kernel_table.cache_clear()
    yield tmp_path
    kernel_table.cache_clear()


def test_shipped_entries_win_and_found_ones_stay(cache) -> None:
    assert kernel_table("products", DEVICE) == {}
    add_to_kernel_table("products", DEVICE, {"a": 1, "b": 2})
    add_to_kernel_table("products", DEVICE, {"b": 3})
    assert kernel_table("products", DEVICE) == {"a": 1, "b": 3}
    (cache / "shipped" / "products").mkdir(parents=True)
    (cache / "shipped" / "products" / "Some_GPU_9.json").write_text(json.dumps({"a": 9}))
    kernel_table.cache_clear()
    assert kernel_table("products", DEVICE) == {"a": 9, "b": 3}
    assert [path.name for path in cache.glob("cache/lightllm/kernels/products/*")] == ["Some_GPU_9.json"]


def test_a_table_that_was_cut_off_is_made_anew(cache) -> None:
    add_to_kernel_table("products", DEVICE, {"a": 1})
    (path,) = cache.glob("cache/lightllm/kernels/products/*")
    path.write_text("")  # as a machine that lost its power leaves it
    kernel_table.cache_clear()
    assert kernel_table("products", DEVICE) == {}
    add_to_kernel_table("products", DEVICE, {"b": 2})
    assert kernel_table("products", DEVICE) == json.loads(path.read_text()) == {"b": 2}


@pytest.mark.parametrize("home", ["a file", "none"])
def test_without_a_folder_this_process_keeps_what_it_found(cache, monkeypatch, home: str) -> None:
    if home == "a file":
        (cache / "cache").write_text("no folder")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert kernel_table("products", DEVICE) == {}
    add_to_kernel_table("products", DEVICE, {"a": 1})
    add_to_kernel_table("products", DEVICE, {"b": 2})
    assert kernel_table("products", DEVICE) == {"a": 1, "b": 2}
    assert kernel_table("sums", DEVICE) == {}


def test_a_full_disk_leaves_nothing_half_written(cache, monkeypatch) -> None:
    add_to_kernel_table("products", DEVICE, {"a": 1})
    real = Path.write_text

    def full(path: Path, text: str) -> int:
        real(path, text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    add_to_kernel_table("products", DEVICE, {"b": 2})
    assert kernel_table("products", DEVICE) == {"a": 1, "b": 2}
    assert [path.name for path in cache.glob("cache/lightllm/kernels/products/*")] == ["Some_GPU_9.json"]


def test_shipped_blocks_divide_their_weights() -> None:
    paths = list((kernel_tables._SHIPPED / "skinny_linear").glob("*.json"))
    for shape, configs in (entry for path in paths for entry in json.loads(path.read_text()).items()):
        outputs, inputs = map(int, shape.split("x"))
        for lines, fields in configs.items():
            assert SkinnyConfig(*fields).fits(int(lines), outputs, inputs), shape
    assert paths


def test_a_cpu_has_nothing_to_tune(cache) -> None:
    tune_products([torch.empty(4096, 4096, dtype=torch.bfloat16)], lambda *told: pytest.fail(str(told)))
    assert not (cache / "cache").exists()
