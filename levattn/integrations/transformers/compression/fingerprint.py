"""Samples of the weights of a decoder, by which a profile knows its model whatever rounding the weights have."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from levattn.integrations.transformers.compression.files import base_of, weights_there

_EACH = 4  # entries of each array
_NEAR = 2.0**-8  # twice the rounding to bfloat16: formats of few bits round matrices, and keep vectors
_TINY = 2.0**-14  # of the largest entry: rounding where a format adds 1 to norms
_FINE, _COARSE = 0.01, 0.15  # relative distances of matrices: twice the rounding to 8 bits, and to 4
_ROUGH, _MANY = 0.5, 8  # the distance where fewer arrays than these can be read
_MOST = 2.0  # times the median norm: what an array counts for at most, so that no outliers hide the other arrays
_BLOCK, _LEVELS = 32, 16  # neighbors that a format of 4 bits holds together, and its numbers


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Entries of all weights of a decoder, and whether the weights were rounded to few bits.

    vectors, matrices: four entries of each array with one axis (norms, biases), and with more, in float32. NaN stands
    for entries of a matrix that a format packs, so that they cannot be read; and infinity for NaN in the weights.

    count: the number of arrays with more than one axis.
    """

    vectors: Any
    matrices: Any
    count: int
    coarse: bool

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the fingerprint of a model."""
        base = base_of(model)
        vectors, matrices, packed, few = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)], False, []
        for _, module in sorted(base.named_modules(), key=lambda pair: pair[0]):
            with weights_there(module):
                for _, array in sorted(module.named_parameters(recurse=False), key=lambda pair: pair[0]):
                    flat = array.detach().reshape(-1)
                    if not flat.is_floating_point():
                        packed = True
                        if array.ndim > 1:
                            matrices.append(np.full(_EACH, np.nan, np.float32))
                    elif array.ndim < 2:
                        vectors.append(_sample(flat))
                    else:
                        matrices.append(_sample(flat))
                        few.append(len(flat[:_BLOCK].float().unique()) <= _LEVELS)
        count = sum(array.ndim > 1 for array in base.parameters())
        known = getattr(base.config, "quantization_config", None) is not None
        coarse = known or packed or 2 * sum(few) > len(few)
        return cls(np.concatenate(vectors), np.concatenate(matrices), count, coarse)

    def fits(self, other: Fingerprint) -> bool:
        """Tell whether two models have the same weights up to rounding."""
        if not self.alike(other):
            return False
        a, b = self.vectors, other.vectors
        if not (np.isfinite(a) & np.isfinite(b)).all():
            return False
        size = np.maximum(np.abs(a), np.abs(b))
        near = np.abs(a - b) <= _NEAR * size + _TINY * size.max(initial=0)
        return bool(near.all()) and self._near_matrices(other)

    def _near_matrices(self, other: Fingerprint) -> bool:
        """Tell whether the matrices that can be read in both are the same up to rounding."""
        a, b = (each.matrices.astype(np.float64).reshape(-1, _EACH) for each in (self, other))
        there = ~(np.isnan(a) | np.isnan(b)).any(1)
        a, b = a[there], b[there]
        if not len(a):
            return True
        if not (np.isfinite(a) & np.isfinite(b)).all():
            return False
        norms = np.sqrt((a**2 + b**2).sum(1))
        usual = _MOST * np.median(norms)
        factor = np.minimum(1, usual / np.where(norms > 0, norms, 1)) if usual else np.ones_like(norms)
        most = _FINE
        if self.coarse or other.coarse:
            most = _COARSE if there.all() or len(a) >= _MANY else _ROUGH
        return bool((factor**2 * ((a - b) ** 2).sum(1)).sum() <= most**2 * (factor**2 * (a**2).sum(1)).sum())

    def alike(self, other: Fingerprint) -> bool:
        """Tell whether two models have as many weights, and so perhaps one architecture."""
        sizes = [(len(each.vectors), len(each.matrices), each.count) for each in (self, other)]
        return sizes[0] == sizes[1]

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and text, which `from_dict` reads."""
        arrays = {
            name: base64.b64encode(getattr(self, name).astype("<f4").tobytes()).decode()
            for name in ("vectors", "matrices")
        }
        return {**arrays, "count": self.count, "coarse": self.coarse}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Self:
        """Return the fingerprint that `to_dict` told of, or raise."""
        arrays = []
        for name in ("vectors", "matrices"):
            array = np.frombuffer(base64.b64decode(facts[name], validate=True), "<f4").astype(np.float32)
            if len(array) % _EACH:
                raise ValueError(f"{name} of its fingerprint are {len(array)}; expected {_EACH} of each array")
            rows = array.reshape(-1, _EACH)
            unread = np.isnan(rows).all(1) & (name == "matrices")
            if not np.isfinite(rows[~unread]).all():
                raise ValueError(f"{name} of its fingerprint are not finite")
            arrays.append(array)
        if type(facts["count"]) is not int or type(facts["coarse"]) is not bool:
            raise ValueError("its fingerprint has no number of arrays, or does not tell whether it is coarse")
        return cls(arrays[0], arrays[1], facts["count"], facts["coarse"])


def _sample(flat: Any) -> Any:
    """Return a few entries of an array, at equal distances, with infinity for NaN."""
    if not len(flat):
        return np.zeros(_EACH, np.float32)
    places = torch.linspace(0, len(flat) - 1, _EACH, device=flat.device, dtype=torch.float64).long()
    found = flat[places].float().cpu().numpy()
    return np.where(np.isnan(found), np.float32(np.inf), found)
