"""Sampling parameters: declared once, checked at the door, carried as columns.

`SamplingParams` is what a client asked for. `NormalizedSampling` is what travels.
"""

from manager.sampling.normalized import NormalizedSampling
from manager.sampling.params import SAMPLES_MAX, TOP_K_ALL, SamplingParams, merge_preferred
from manager.sampling.table import reference_table
from manager.sampling.wire import SAMPLING_DTYPE, decode_extras

__all__ = [
    "SAMPLES_MAX",
    "SAMPLING_DTYPE",
    "TOP_K_ALL",
    "NormalizedSampling",
    "SamplingParams",
    "decode_extras",
    "merge_preferred",
    "reference_table",
]
