"""The variational bound of one denoising step, by which variances are learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF_BIN = 1 / 255  # half the distance of two of 256 grey levels from -1 to 1


def bits_per_dimension(
    images: Tensor,
    noisy: Tensor,
    times: Tensor,
    noise: Tensor,
    variances: Tensor,
    alphas_cumprod: Tensor,
) -> Tensor:
    """What step t of the reverse process costs, in bits per number (Improved DDPM, Sec. 3.1)::

        t > 0:  KL(q(x_{t-1} | x_t, x₀) ‖ N(μ, Σ))
        t = 0:  -log P(x₀ | N(μ, Σ)), of grey levels

        μ = (x_t - β_t / √(1 - ᾱ_t) ε_θ) / √α_t
        log Σ = w log β_t + (1 - w) log β̃_t             (Eq. 15)

    with w = (variances + 1) / 2 and β̃_t = β_t (1 - ᾱ_{t-1}) / (1 - ᾱ_t), of which t = 0 has that
    of t = 1.

    Args:
        images: x₀ [B, C, H, W], from -1 to 1.
        noisy: x_t [B, C, H, W].
        times: t [B], int64.
        noise: ε_θ [B, C, H, W].
        variances: what the model says of them, [B, C, H, W].
        alphas_cumprod: ᾱ [T].

    Returns:
        [B].
    """
    cumulative = alphas_cumprod.to(images.device, torch.float64)
    former = torch.cat((cumulative.new_ones(1), cumulative[:-1]))  # ᾱ_{t-1}
    alphas = cumulative / former
    betas = 1 - alphas
    posterior = betas * (1 - former) / (1 - cumulative)  # β̃
    posterior = torch.cat((posterior[1:2], posterior[1:]))

    def at(coefficients: Tensor) -> Tensor:
        return coefficients[times].to(images.dtype).view(-1, 1, 1, 1)

    true_mean = at(former.sqrt() * betas / (1 - cumulative)) * images
    true_mean = true_mean + at(alphas.sqrt() * (1 - former) / (1 - cumulative)) * noisy
    mean = (noisy - at(betas / (1 - cumulative).sqrt()) * noise) / at(alphas.sqrt())
    share = (variances + 1) / 2
    log_variance = share * at(betas.log()) + (1 - share) * at(posterior.log())

    divergence = _normal_divergence(true_mean, at(posterior.log()), mean, log_variance)
    decoding = -_log_probability(images, mean, log_variance)
    nats = torch.where(times.view(-1, 1, 1, 1) == 0, decoding, divergence)
    return nats.flatten(1).mean(1) / math.log(2)


def _normal_divergence(
    mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor
) -> Tensor:
    """KL(N₁ ‖ N₂) of each number, in nats."""
    ratio = (log_variance1 - log_variance2).exp()
    distance = (mean1 - mean2).square() * (-log_variance2).exp()
    return 0.5 * (ratio + distance - 1 - (log_variance1 - log_variance2))


def _log_probability(images: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """log P of each number's grey level, one of 256, under a normal distribution, in nats.

    The darkest and the brightest level include what lies beyond them.
    """
    inverse = (-0.5 * log_variance).exp()
    below = torch.special.ndtr((images - _HALF_BIN - mean) * inverse)
    above = torch.special.ndtr((images + _HALF_BIN - mean) * inverse)
    below = torch.where(images <= -1 + _HALF_BIN, torch.zeros_like(below), below)
    above = torch.where(images >= 1 - _HALF_BIN, torch.ones_like(above), above)
    return (above - below).clamp_min(1e-12).log()
