"""From noise to images: each solver against the process it turns round, and what repeats."""

import pytest
import torch
from diffusers import DDPMScheduler

from tolerances import assert_close
from vision_ttt.diffusion import FlowMatching, NoisePrediction, draw, make_process, sample
from vision_ttt.tasks.diffusion.pictures import CENTRED, grid, to_pixels, to_png

LABELS = torch.tensor([0, 1, 2, 1])


def _generators(count):
    return [torch.Generator().manual_seed(place) for place in range(count)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_ddim_follows_the_way_of_each_noise(schedule, steps):
    process = NoisePrediction(schedule)
    solver = process.solver("ddim", steps, clip=False, learned_variances=True)
    bars = process.scheduler.alphas_cumprod.double()
    assert solver.times[0] == 999
    assert steps == 1 or solver.times[-1] == 0
    noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    image = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()

    def noised(bar):
        return bar.sqrt() * image + (1 - bar).sqrt() * noise

    x = noised(bars[999])
    answer = torch.cat((noise, torch.full_like(noise, 9.0)), dim=1)  # variances play no part
    for number, time in enumerate(solver.times):
        assert_close(x, noised(bars[int(time)]), 2e-3)
        x = solver.step(number, answer, x, _generators(2))
    # Far out, the last digits of float32 are magnified by 1 / √ᾱ.
    assert_close(x, image, 0.05 if schedule == "cosine" else 5e-3)


def test_ddpm_keeps_the_spread_of_each_time():
    """Of images that are all 0, the noisy ones have variance 1 - ᾱ at each kept step."""
    process = NoisePrediction()
    solver = process.solver("ddpm", 20, clip=False, learned_variances=False)
    bars = process.scheduler.alphas_cumprod
    x = (1 - bars[999]).sqrt() * torch.randn(1, 1, 200, 200, generator=_generators(1)[0])
    generators = [torch.Generator().manual_seed(5)]
    for number, time in enumerate(solver.times):
        spread = (1 - bars[int(time)]).sqrt()
        assert x.std().item() == pytest.approx(spread.item(), rel=0.03)
        x = solver.step(number, x / spread, x, generators)
    assert x.abs().max() < 1e-3


def test_every_step_of_ddpm_is_diffusers_own():
    ours = NoisePrediction().solver("ddpm", 1000, clip=True, learned_variances=True)
    theirs = DDPMScheduler(variance_type="learned_range")
    theirs.set_timesteps(1000)
    x = torch.randn(1, 1, 4, 4, generator=_generators(1)[0])
    says = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    for number in (0, 400, 998, 999):
        got = ours.step(number, says, x, _generators(1))
        wanted = theirs.step(says, 999 - number, x, generator=_generators(1)).prev_sample
        # Their betas are not rounded by way of ᾱ.
        assert_close(got, wanted, 2e-3)


def test_learned_variances_lie_between_two_bounds():
    process = NoisePrediction()
    x = torch.randn(1, 1, 8, 8, generator=_generators(1)[0])
    fixed = process.solver("ddpm", 10, clip=False, learned_variances=False)
    learned = process.solver("ddpm", 10, clip=False, learned_variances=True)
    mean = fixed.step(3, x * 0, x, _generators(1)) - x * 0
    least = learned.step(3, torch.cat((x * 0, x * 0 - 1), dim=1), x, _generators(1))
    most = learned.step(3, torch.cat((x * 0, x * 0 + 1), dim=1), x, _generators(1))
    torch.testing.assert_close(least, mean)
    kept = [int(learned.times[number]) for number in (3, 4)]
    bar, former = process.scheduler.alphas_cumprod[kept]
    beta = 1 - bar / former
    ratio = (1 / ((1 - former) / (1 - bar))).sqrt()  # √(β / β̃)
    centre = x / (1 - beta).sqrt()
    assert_close(most - centre, ratio * (least - centre), 1e-4)


@pytest.mark.parametrize("steps", [1, 5])
def test_euler_follows_a_straight_way(steps):
    solver = FlowMatching().solver("euler", steps, clip=True, learned_variances=False)
    noise, image = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = noise
    for number, time in enumerate(solver.times):
        assert_close(x, image + time / 1000 * (noise - image), 1e-5)
        x = solver.step(number, noise - image, x, _generators(2))
    assert_close(x, image, 1e-5)
    assert solver.times == pytest.approx([1000 * (1 - n / steps) for n in range(steps)])


PROCESSES = {"ddim": "noise", "ddpm": "noise", "euler": "flow"}


@pytest.mark.parametrize("sampler", PROCESSES)
def test_samples_repeat_by_seed_and_place(make_model, sampler):
    process = make_process(PROCESSES[sampler])
    model = make_model(learn_sigma=PROCESSES[sampler] == "noise")
    options = {"sampler": sampler, "steps": 4, "guidance": 2.0}
    first = sample(model, process, LABELS, seed=3, **options)
    assert first.shape == (4, 3, 8, 8)
    assert torch.equal(first, sample(model, process, LABELS, seed=3, **options))
    assert not torch.allclose(first, sample(model, process, LABELS, seed=4, **options), atol=0.1)
    # Neither the neighbours nor the batch size matter.
    in_parts = sample(model, process, LABELS[:3], seed=3, batch_size=2, **options)
    assert_close(in_parts, first[:3], 1e-4)
    assert not torch.allclose(first[1], first[3], atol=0.1)


def test_size_is_free(make_model):
    model, process = make_model(), make_process()
    assert sample(model, process, LABELS[:1], size=4, steps=2).shape[2:] == (4, 4)
    images = sample(model, process, LABELS[:1], size=(4, 12), steps=2)
    assert images.shape == (1, 3, 4, 12)
    assert sample(model, process, LABELS[:0], steps=2).shape == (0, 3, 8, 8)


def test_no_guidance_asks_for_the_class_alone(make_model):
    model, process = make_model(), make_process()
    calls = []
    model.register_forward_hook(lambda _m, given, _o: calls.append(given[2].tolist()))
    advanced = []
    plain = sample(model, process, LABELS, steps=3, guidance=1.0, advance=advanced.append)
    assert calls == [[0, 1, 2, 1]] * 3
    assert advanced == [4, 4, 4]
    calls.clear()
    almost = sample(model, process, LABELS, steps=3, guidance=1 + 1e-7)
    assert calls == [[0, 1, 2, 1, 3, 3, 3, 3]] * 3
    assert_close(almost, plain, 1e-3)
    none = torch.full_like(LABELS, 3)
    without = sample(model, process, none, steps=3)
    assert_close(sample(model, process, LABELS, steps=3, guidance=0.0), without, 1e-3)
    assert not torch.allclose(without, plain, atol=0.05)


def test_guidance_is_of_every_channel_of_latents(make_model):
    model = make_model(in_channels=4, learn_sigma=False)
    process = make_process()
    one, two = (sample(model, process, LABELS, steps=1, guidance=g, clip=False) for g in (1.0, 2.0))
    assert ((one - two).abs().amax(dim=(0, 2, 3)) > 1e-2).all()


def test_clipping_is_for_pixels(make_model):
    model = make_model()
    clipped = sample(model, make_process(), LABELS, steps=2)
    free = sample(model, make_process(), LABELS, steps=2, clip=False)
    assert clipped.abs().max() <= 1 + 1e-5
    assert free.abs().max() > 2


def test_images_can_be_changed_in_place(make_model):
    made = sample(make_model(), make_process(), LABELS, steps=1)
    assert made.mul_(2).isfinite().all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"labels": LABELS[None]}, r"labels must be \[N\], got \[1, 4\]"),
        ({"labels": torch.tensor([4])}, "classes 0 to 3, 3 being none, got"),
        ({"guidance": -1.0}, "guidance is -1.0; it must be at least 0"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"guidance": float("inf")}, "guidance is inf"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"sampler": "euler"}, "sampler is 'euler'; accepted: ddim, ddpm"),
        ({"steps": 0}, "steps is 0; accepted: 1 to 1000"),
        ({"steps": 1001}, "steps is 1001; accepted: 1 to 1000"),
        ({"size": (8, 9)}, "images of 8 × 9 are not whole patches"),
    ],
)
def test_what_does_not_fit(make_model, options, told):
    given = {"labels": LABELS, "steps": 1, **options}
    with pytest.raises(ValueError, match=told):
        sample(make_model(), make_process(), given.pop("labels"), **given)


def test_labels_are_checked_before_the_first_step(make_model):
    steps = []
    with pytest.raises(ValueError, match="classes 0 to 3, 3 being none, got"):
        sample(
            make_model(), make_process(), torch.tensor([0, 9]), batch_size=1, advance=steps.append
        )
    assert steps == []


def test_what_does_not_fit_the_model_or_flow(make_model):
    with pytest.raises(ValueError, match="class_dropout_prob=0 and knows no image without class"):
        sample(make_model(class_dropout_prob=0.0), make_process(), LABELS, guidance=2.0)
    flow = make_process("flow")
    with pytest.raises(ValueError, match="flow matching has no variances"):
        sample(make_model(), flow, LABELS)
    model = make_model(learn_sigma=False)
    with pytest.raises(ValueError, match="sampler is 'ddim'; accepted: euler"):
        sample(model, flow, LABELS, sampler="ddim")
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        sample(model, flow, LABELS, steps=0)


def test_pictures():
    samples = torch.zeros(3, 3, 2, 2)
    samples[1], samples[2] = 1.0, -3.0
    pixels = to_pixels(samples, CENTRED)
    assert pixels.flatten(1).unique(dim=1).flatten().tolist() == [128, 255, 0]
    assert to_pixels(samples[:1], {"mean": (0.1, 0.2, 0.3), "std": (1.0,) * 3})[
        0, :, 0, 0
    ].tolist() == [26, 51, 76]
    whole = grid(pixels, columns=2)
    assert whole.shape == (3, 2 * 50 + 2, 2 * 50 + 2)  # magnified 24 times, two pixels between
    assert [whole[0, y, x].item() for y, x in [(2, 2), (49, 49), (2, 52), (52, 2)]] == [
        *(128, 128, 255, 0)
    ]
    assert to_png(pixels[0]).startswith(b"\x89PNG")


def test_rows_are_labelled():
    pixels = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
    plain, labels = grid(pixels, 2), ["cat", "émeu", "a very long name of a class that goes on"]
    picture = grid(pixels, 2, labels)
    width = picture.shape[2] - plain.shape[2]
    assert torch.equal(picture[..., width:], plain)
    column = picture[..., :width]
    rows = column.split([51, 50, 51], dim=1)
    assert all((row < 128).any() for row in rows)  # something is written beside each
    assert not torch.equal(rows[0][:, :50], rows[1])
    assert (column[..., :2] == 255).all()  # and not cut off at its beginning
    assert width <= 13 * 14  # pixels of a font: the long name is cut
    with pytest.raises(ValueError, match="a label for each of 3 rows, got 2"):
        grid(pixels, 2, labels[:2])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("objective", ["noise", "flow"])
def test_pytorchs_defaults_change_no_number(make_model, objective, default):
    model = make_model(learn_sigma=objective == "noise")

    def everything():
        process = make_process(objective)
        torch.manual_seed(0)
        images = torch.zeros(4, 3, 8, 8, device="cpu", dtype=torch.float32)
        losses = process.losses(model, images, LABELS, *draw(images))
        samples = sample(model, process, LABELS, steps=3, guidance=2.0)
        return losses, samples, to_pixels(samples, {"mean": (0.5,) * 3, "std": (0.25,) * 3})

    wanted = everything()
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        got = everything()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_model_in_bfloat16_makes_samples(make_model, guidance):
    samples = sample(make_model().bfloat16(), make_process(), LABELS, steps=2, guidance=guidance)
    assert samples.isfinite().all()
