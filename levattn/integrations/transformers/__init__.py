"""Models of Hugging Face transformers, with attention of ours. Needs the extra ``transformers``.

`macchiato_from` extends a pretrained causal decoder: its own attention, restricted to a window, is mixed with latents
that read all positions before, so that it decodes in constant memory.
"""

from __future__ import annotations

try:
    from levattn.integrations.transformers._macchiato import (
        latent_parameters,
        latent_state_dict,
        load_latent_state_dict,
        macchiato_from,
        remove,
        state_size,
    )
except ImportError as error:
    raise ImportError('this needs torch and transformers>=4.56: pip install "levattn[transformers]"') from error

__all__ = [
    "latent_parameters",
    "latent_state_dict",
    "load_latent_state_dict",
    "macchiato_from",
    "remove",
    "state_size",
]
