"""Models of Hugging Face transformers, with the attention of levattn. Needs the extra ``transformers``.

`prune` lets layers of any model attend to a few keys and to summaries of the others, and reports the effect.
`macchiato_from` extends a pretrained causal decoder, so that it decodes in constant memory. It restricts the model's
own attention to a window, and mixes it with latents that read all earlier positions.
"""

from __future__ import annotations

from levattn._core.checks import needing

with needing("this needs torch and transformers>=4.56", "transformers"):
    from levattn.integrations.transformers.budget_search import calibrate
    from levattn.integrations.transformers.calibration import Calibration
    from levattn.integrations.transformers.compression.ablation import head_profile
    from levattn.integrations.transformers.compression.cache import CompressedCache
    from levattn.integrations.transformers.compression.compress import compress
    from levattn.integrations.transformers.compression.profile import HeadProfile
    from levattn.integrations.transformers.evaluation import Evaluation, evaluate
    from levattn.integrations.transformers.inspection import Inspection, inspect_model
    from levattn.integrations.transformers.latents import (
        latent_parameters,
        latent_state_dict,
        load_latent_state_dict,
        macchiato_from,
        remove,
        state_size,
    )
    from levattn.integrations.transformers.prompt import Prompt
    from levattn.integrations.transformers.pruning import prune, register
    from levattn.integrations.transformers.report import PruneReport

__all__ = [
    "Calibration",
    "CompressedCache",
    "Evaluation",
    "HeadProfile",
    "Inspection",
    "Prompt",
    "PruneReport",
    "calibrate",
    "compress",
    "evaluate",
    "head_profile",
    "inspect_model",
    "latent_parameters",
    "latent_state_dict",
    "load_latent_state_dict",
    "macchiato_from",
    "prune",
    "register",
    "remove",
    "state_size",
]
