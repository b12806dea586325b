"""Host arrays to the device and back without waiting."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.host_memory import ADDRESS, fetch


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a GPU copied through pinned memory behind the work queued before it.

    torch's pinned-memory cache hands a block out again only after the copies from it are done, so that the caller may
    forget it at once. On a CPU the tensor shares the array's memory.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    return _pinned(array).to(device, non_blocking=True)


def to_device_at_once(
    wide: Sequence[np.ndarray], narrow: Sequence[np.ndarray], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """The arrays as int64 and as int32 tensors on `device`, cut out of one buffer that is copied once."""
    middle = 2 * sum(map(len, wide))
    buffer = np.empty(middle + sum(map(len, narrow)), dtype=np.int32)
    np.concatenate(wide, out=buffer[:middle].view(np.int64))
    np.concatenate(narrow, out=buffer[middle:])
    tensor = to_device(buffer, device)
    return (
        list(tensor[:middle].view(torch.int64).split([len(array) for array in wide])),
        list(tensor[middle:].split([len(array) for array in narrow])),
    )


def send(letter: Tensor, numbers: np.ndarray, answer: int) -> Tensor:
    """Fills letter int32 [ADDRESS + n] with an address, to which `deliver` writes, and n numbers. Gives what is there:
    int32 [answer] on the host, which on a GPU must be kept until the device has read the letter and answered."""
    host = torch.empty(answer + len(letter), dtype=torch.int32, pin_memory=letter.is_cuda)
    array = host.numpy()
    array[answer : answer + ADDRESS].view(np.int64)[0] = host.data_ptr()
    array[answer + ADDRESS :] = numbers
    fetch(letter, host[answer:])
    return host[:answer]


def _pinned(array: np.ndarray) -> Tensor:
    """Copied by numpy: torch wakes other threads for more than 32,768 numbers, which takes milliseconds."""
    host = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    host.numpy()[...] = array
    return host
