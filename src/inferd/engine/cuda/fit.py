"""Whether a CUDA device holds its part of a model's weights, and which layout would, before they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from inferd.checkpoints.architecture import ITEM_BYTES, dtype_name, read_config
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.footprint import used_tensors
from inferd.checkpoints.stored.layout import layouts
from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.engine.model.share import Share, indivisible
from inferd.errors import ModelLoadError


def part_bytes(folder: Path, config: ModelConfig, *, on_cpu: bool) -> Callable[[Share], int]:
    """What gives the bytes of a rank's weights. Raises ModelLoadError."""
    source = Source(folder / "config.json")
    dims = read_config(source)
    tensors = used_tensors(folder, dims)
    quantised = {} if source.quantization is None else layouts(source.quantization, tensors, str(folder))
    itemsize = ITEM_BYTES[dtype_name(config.dtype, dims.dtype, on_cpu=on_cpu, source=source)]
    return lambda share: share.weight_bytes(tensors, quantised, dims, itemsize, config.quantization)


def refuse_on(device: torch.device, folder: Path, config: ModelConfig, share: Share) -> None:
    """Raises ModelLoadError, with the remedy, where the device has too little free memory for a rank's weights."""
    free_bytes = int(torch.cuda.mem_get_info(device)[0])
    refuse_more_than_is_free(folder, config, share, free_bytes, str(device), torch.cuda.device_count())


def refuse_more_than_is_free(
    folder: Path, config: ModelConfig, share: Share, free_bytes: int, device: str, num_devices: int
) -> None:
    """``free_bytes``: of ``device``; ``num_devices``: of this machine, which are taken to be like it."""
    needed = part_bytes(folder, config, on_cpu=False)
    if needed(share) <= free_bytes:
        return
    weights = "The weights take" if share.count == 1 else f"The part of the weights of rank {share.rank} takes"
    dims = read_config(Source(folder / "config.json"))
    parts = fewest_parts(dims, needed, free_bytes, num_devices - config.first_gpu)
    remedy = (
        f"Set parallel to {{tensor: {parts}}}: {parts} such devices hold them"
        if parts is not None
        else "Free the device, set quantization to int8 or fp8, or take a smaller model: all devices of this machine "
        "together do not hold them"
    )
    raise ModelLoadError(
        f"{weights} {bytes_text(needed(share))}, but {device} has {bytes_text(free_bytes)} free. {remedy}.",
        param="parallel",
    )


def fewest_parts(dims: DecoderConfig, needed: Callable[[Share], int], free_bytes: int, num_devices: int) -> int | None:
    """The fewest devices that hold the weights, with a part of each layer on each; None: ``num_devices`` do not."""
    for parts in range(2, num_devices + 1):
        if indivisible(dims, parts, 1) is None and needed(Share(0, parts)) <= free_bytes:
            return parts
    return None
