"""Pretrained decoders extended by latents."""
