"""What is learnt: each objective and its bound against what they are by definition."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from torch.distributions import Normal, kl_divergence

from vision_ttt.diffusion import FlowMatching, NoisePrediction, draw, make_process
from vision_ttt.diffusion.variational import bits_per_dimension


def _batch(count=6, channels=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, channels, 4, 4, generator=generator) * 2 - 1
    labels = torch.arange(count) % 3
    return images, labels, *draw(images, generator)


def _cumulative(schedule="linear", steps=1000):
    if schedule == "linear":
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
        return (1 - betas).cumprod(0)
    place = torch.arange(steps + 1, dtype=torch.float64) / steps
    bar = torch.cos((place + 0.008) / 1.008 * math.pi / 2) ** 2  # Improved DDPM, Eq. 17
    return (1 - (1 - bar[1:] / bar[:-1]).clamp_max(0.999)).cumprod(0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_noise_prediction_is_ddpms_objective(schedule):
    images, labels, places, noise = _batch()
    process = NoisePrediction(schedule)
    heard = {}

    def predict(noisy, times, given):
        heard.update(noisy=noisy, times=times, labels=given)
        return noise + 0.5

    assert process.losses(predict, images, labels, places, noise).tolist() == [0.25] * 6
    assert heard["times"].tolist() == [int(1000 * place) for place in places]
    assert torch.equal(heard["labels"], labels)
    bar = _cumulative(schedule)[heard["times"]].view(-1, 1, 1, 1)
    wanted = bar.sqrt() * images + (1 - bar).sqrt() * noise
    torch.testing.assert_close(heard["noisy"].double(), wanted, rtol=0, atol=1e-4)


def test_linear_schedule_is_scaled_to_fewer_steps():
    few = NoisePrediction("linear", 100).scheduler.alphas_cumprod.double()
    torch.testing.assert_close(few[20:].log(), _cumulative()[209::10].log(), rtol=0.08, atol=0)


def test_flow_matching_is_the_velocity_on_straight_ways():
    images, labels, places, noise = _batch()
    heard = {}

    def predict(noisy, times, given):
        heard.update(noisy=noisy, times=times)
        return noise - images + 2

    assert FlowMatching().losses(predict, images, labels, places, noise) == pytest.approx([4.0] * 6)
    assert torch.equal(heard["times"], 1000 * places)
    sigma = places.view(-1, 1, 1, 1)
    torch.testing.assert_close(heard["noisy"], images + sigma * (noise - images))


def _posterior(images, noisy, time, cumulative):
    """q(x_{t-1} | x_t, x₀) by Bayes' rule of two normal distributions."""
    former = cumulative[time - 1]
    alpha = cumulative[time] / former
    precision = 1 / (1 - former) + alpha / (1 - alpha)
    mean = former.sqrt() * images / (1 - former) + alpha.sqrt() * noisy / (1 - alpha)
    return Normal(mean / precision, precision**-0.5)


@pytest.mark.parametrize("time", [1, 300, 999])
def test_bound_is_the_divergence_of_a_step(time):
    images, _, _, noise = _batch(2)
    images, noise = images.double(), noise.double()
    cumulative = _cumulative()
    times = torch.full((2,), time)
    noisy = cumulative[time].sqrt() * images + (1 - cumulative[time]).sqrt() * noise
    guessed, variances = 0.9 * noise + 0.1, torch.linspace(-1, 1, 96).view(2, 3, 4, 4).double()
    got = bits_per_dimension(images, noisy, times, guessed, variances, cumulative)
    true = _posterior(images, noisy, time, cumulative)
    believed = (noisy - (1 - cumulative[time]).sqrt() * guessed) / cumulative[time].sqrt()
    beta = 1 - cumulative[time] / cumulative[time - 1]
    share = (variances + 1) / 2
    log_variance = share * beta.log() + (1 - share) * 2 * true.stddev.log()
    model = Normal(_posterior(believed, noisy, time, cumulative).mean, (log_variance / 2).exp())
    wanted = kl_divergence(true, model).flatten(1).mean(1) / math.log(2)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    # With the true noise and the least variance, the step is the true one.
    least = -torch.ones_like(noise)
    exact = bits_per_dimension(images, noisy, times, noise, least, cumulative)
    assert exact.abs().max() < 1e-9


def test_bound_of_the_last_step_is_a_distribution_of_grey_levels():
    levels = (torch.arange(256, dtype=torch.float64) / 127.5 - 1).view(256, 1, 1, 1)
    cumulative = _cumulative()
    times = torch.zeros(256, dtype=torch.int64)
    for mean, variance in [(0.3, 0.7), (-0.99, -1.0), (1.02, 1.0)]:
        noisy = torch.full((256, 1, 1, 1), mean * cumulative[0].sqrt().item()).double()
        bits = bits_per_dimension(
            levels, noisy, times, torch.zeros(1, 1, 1, 1).double(),
            torch.full((256, 1, 1, 1), variance).double(), cumulative,
        )  # fmt: skip
        probabilities = 2**-bits
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-6)
        expected = (probabilities * levels.flatten()).sum().item()
        assert expected == pytest.approx(max(-1, min(1, mean)), abs=0.01)


def test_variances_learn_by_the_bound_and_noise_does_not():
    images, labels, places, noise = _batch()
    process = NoisePrediction()
    answer = torch.randn(6, 6, 4, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    losses = process.losses(lambda *_: answer, images, labels, places, noise)
    losses.sum().backward()
    error = answer[:, :3].detach() - noise
    torch.testing.assert_close(answer.grad[:, :3], 2 * error / error[0].numel())
    assert (answer.grad[:, 3:] != 0).all()
    times = (places * 1000).long()
    noisy = process.scheduler.add_noise(images, noise, times)
    bound = bits_per_dimension(
        images, noisy, times, answer[:, :3], answer[:, 3:], process.scheduler.alphas_cumprod
    )
    torch.testing.assert_close(losses, error.square().flatten(1).mean(1) + bound)
    tenth = NoisePrediction(steps=100)
    assert tenth.losses(lambda *_: answer, images, labels, places, noise).isfinite().all()


def test_variances_are_diffusers_own():
    """What training teaches is what DDPM's scheduler does with it."""
    cumulative = NoisePrediction().scheduler.alphas_cumprod
    scheduler = DDPMScheduler(variance_type="learned_range", clip_sample=False)
    scheduler.set_timesteps(1000)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    says = torch.cat((torch.zeros_like(x), torch.full_like(x, 0.4)), dim=1)
    before = scheduler.step(says, 500, x, generator=torch.Generator().manual_seed(1)).prev_sample
    noise = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    beta = 1 - cumulative[500] / cumulative[499]
    least = beta * (1 - cumulative[499]) / (1 - cumulative[500])
    log_variance = 0.7 * beta.log() + 0.3 * least.log()
    mean = x / (1 - beta).sqrt()
    torch.testing.assert_close(before, mean + (log_variance / 2).exp() * noise)


def test_draws_repeat_by_generator():
    images = torch.zeros(3, 1, 2, 2, dtype=torch.float64)
    first, second = (draw(images, torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(map(torch.equal, first, second))
    places, noise = draw(torch.zeros(4000, 1, 1, 1), torch.Generator().manual_seed(7))
    assert 0 <= places.min() < 0.01 < 0.99 < places.max() < 1
    assert noise.std().item() == pytest.approx(1, abs=0.05)
    assert first[1].dtype == torch.float64


@pytest.mark.parametrize(
    "described",
    [{"objective": "noise", "schedule": "cosine", "steps": 50}, {"objective": "flow"}],
)
def test_a_process_describes_itself(described):
    assert make_process(**described).describe() == described


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"objective": "score"}, "objective is 'score'; accepted: noise, flow"),
        ({"schedule": "sigmoid"}, "schedule is 'sigmoid'; accepted: linear, cosine"),
        ({"steps": 1}, "steps is 1; it must be at least 2"),
    ],
)
def test_processes_that_do_not_exist(arguments, told):
    with pytest.raises(ValueError, match=told):
        make_process(**arguments)


def test_models_of_another_objective_are_refused():
    images, labels, places, noise = _batch()
    both = torch.cat((noise, noise), dim=1)
    with pytest.raises(ValueError, match=r"answers with 3 channels, got \[6, 6, 4, 4\]"):
        FlowMatching().losses(lambda *_: both, images, labels, places, noise)
    with pytest.raises(ValueError, match=r"answers with 3 or 6, got \[6, 1, 4, 4\]"):
        NoisePrediction().losses(lambda *_: noise[:, :1], images, labels, places, noise)
