"""A run: every block's sweeps over the bands of one picture, from the recorded progress to the end.

The tokens are in a store with room for one more band and its halo. A block's last sweep writes each
band shifted by this room: it overwrites nothing that must still be read, and a band can be repeated
after a kill. The next block's last sweep runs in the other direction and shifts the tokens back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vision_ttt.whole.bands import Band, BandTokens, cut, separate
from vision_ttt.whole.embedding import Embedding, Picture
from vision_ttt.whole.errors import WholePictureError
from vision_ttt.whole.plan import Plan
from vision_ttt.whole.scratch import Progress, Scratch
from vision_ttt.whole.stores import FileStore, KeptBands, MemoryStore, Store, checksum
from vision_ttt.whole.sweeps import SIDE, TOKENS, BandedBlock, Sweep, stored_side

Report = Callable[[int, int], None]
"""Called after each band with the number of bands done, over all sweeps, and the total number."""


def descends(block: int) -> bool:
    """Whether the last sweep of a block begins at the last band."""
    return block % 2 == 1


class Run:
    """A run of a model on one picture.

    Args:
        embedding: makes the first tokens.
        blocks: the model's.
        norm: of the last tokens.
        extra: class tokens [1, n, D].
        positions: the positions of the class tokens in the sequence.
        plan: of bands and storage.
        storage: dtype of stored tokens.
        scratch: where the run is recorded and its tokens are; None for memory.
        report: of progress.
    """

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[BandedBlock],
        norm: nn.Module,
        extra: Tensor,
        positions: Sequence[int],
        plan: Plan,
        storage: torch.dtype,
        scratch: Scratch | None,
        report: Report,
    ) -> None:
        self.embedding, self.blocks, self.norm, self.grid = embedding, blocks, norm, plan.grid
        self.bands = cut(plan.grid, plan.rows, positions)
        self.length = plan.grid[0] * plan.grid[1] + len(positions)
        self.dim = extra.shape[-1]
        self.side_width = max((block.side_width for block in blocks), default=0)
        side_dtype = stored_side(blocks, storage)
        self.shift = plan.rows + max((block.halo for block in blocks), default=0)
        self.scratch, self.report = scratch, report
        self.progress = Progress() if scratch is None else scratch.progress
        if not self.progress.tensors:
            side = torch.zeros(1, extra.shape[1], self.side_width, dtype=side_dtype)
            self.progress.tensors = {"extra": extra, "next_extra": extra, "side_extra": side}
        height, width = plan.grid
        self.stores = {TOKENS: self._store(TOKENS, height + self.shift, width * self.dim, storage)}
        if self.side_width:
            self.stores[SIDE] = self._store(SIDE, height, width * self.side_width, side_dtype)
        self.steps = [
            (index, sweep) for index, block in enumerate(blocks) for sweep in block.sweeps()
        ]
        self._check_stored()

    def _store(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Store:
        if self.scratch is None:
            return (KeptBands if name == SIDE else MemoryStore)(rows, width, dtype)
        path: Path = self.scratch.folder / name
        if self.scratch.resumes and not path.exists():
            raise WholePictureError(
                f"{path} is missing; remove the scratch folder or give another one"
            )
        return FileStore(path, rows, width, dtype)

    def _base(self, block: int) -> int:
        """The row of the store at which the input tokens of a block begin."""
        return 0 if descends(block) else self.shift

    def run(self, picture: Picture) -> None:
        """Run the sweeps, or what remains of them."""
        if self.progress.sweep == 0:
            for band in self.bands[self.progress.bands :]:
                self._embed(picture, band)
                self._done()
        for index in range(self.progress.sweep - 1, len(self.steps)):
            self._sweep(*self.steps[index])

    @torch.no_grad()
    def tokens(self, first: int, last: int) -> Tensor:
        """The last tokens of rows ``first`` … ``last`` - 1, normalised: [1, n, D]."""
        x = self._read(TOKENS, self._base(len(self.blocks)), first, last, self.dim)
        return self.norm(x.float())

    @torch.no_grad()
    def extra(self) -> Tensor:
        """The last class tokens, normalised: [1, n, D]."""
        return self.norm(self.progress.tensors["extra"])

    def close(self) -> None:
        """Close the stores' files."""
        for store in self.stores.values():
            if isinstance(store, FileStore):
                store.close()

    @torch.no_grad()
    def _embed(self, picture: Picture, band: Band) -> None:
        x = self.embedding.tokens(picture, self.grid, band.first, band.last)
        self._write(TOKENS, self._base(0), band, x)

    def _sweep(self, index: int, sweep: Sweep) -> None:
        tensors = self.progress.tensors
        state = tensors.get("state")
        order = self.bands[::-1] if sweep.descending else self.bands
        for band in order[self.progress.bands :]:
            state = self._step(index, sweep, band, state)
            last = self.progress.bands + 1 == len(self.bands)
            following = self.steps[self.progress.sweep : self.progress.sweep + 1]
            if last and sweep.writes == TOKENS:
                tensors["extra"] = tensors["next_extra"]
            tensors = {name: tensors[name] for name in ("extra", "next_extra", "side_extra")}
            # Within a sweep, the local `state` is passed on; the tensors are only for the record.
            kept = following and following[0][1].goes_on if last else self.scratch is not None
            if kept and state is not None:
                tensors["state"] = state.contiguous()
            self.progress.tensors = tensors
            self._done()

    @torch.no_grad()
    def _step(self, index: int, sweep: Sweep, band: Band, state: Tensor | None) -> Tensor | None:
        """Run a sweep on one band, and return the state after it."""
        block, tensors = self.blocks[index], self.progress.tensors
        height, width = self.grid
        above, below = min(block.halo, band.first), min(block.halo, height - band.last)
        base = self._base(index)
        read = self._read(TOKENS, base, band.first - above, band.last + below, self.dim).float()
        side = None
        if block.side_width and sweep.writes == TOKENS:
            side = self._read(SIDE, 0, band.first, band.last, block.side_width)
        given = BandTokens(
            *(read, above, below, width, tensors["extra"][:, band.extra], band.places),
            *(band.start, self.length, None),
        )
        if side is not None:
            extra = given._replace(extra=tensors["side_extra"][:, band.extra])
            given = given._replace(side=extra.sequence(side).to(block.side_dtype))
        out, state = sweep.run(given, state)
        if out is not None:
            image, extra = separate(out, band.places)
            name = "side_extra" if sweep.writes == SIDE else "next_extra"
            tensors[name] = tensors[name].clone()
            tensors[name][:, band.extra] = extra
            self._write(
                sweep.writes, 0 if sweep.writes == SIDE else self._base(index + 1), band, image
            )
        return state

    def _read(self, name: str, base: int, first: int, last: int, width: int) -> Tensor:
        rows = self.stores[name].read(base + first, base + last)
        return rows.view(1, (last - first) * self.grid[1], width)

    def _write(self, name: str, base: int, band: Band, x: Tensor) -> None:
        store = self.stores[name]
        raw = store.write(base + band.first, x.reshape(band.last - band.first, store.width))
        if self.scratch is not None:
            sums = self.progress.sums.setdefault(name, [0] * len(self.bands))
            sums[self.bands.index(band)] = checksum(raw)

    def _done(self) -> None:
        """Count a band, write the record and report."""
        progress, count = self.progress, len(self.bands)
        progress.bands += 1
        if progress.bands == count:
            progress.sweep, progress.bands = progress.sweep + 1, 0
        if self.scratch is not None:
            self.scratch.write()
        self.report(progress.sweep * count + progress.bands, (len(self.steps) + 1) * count)

    def _check_stored(self) -> None:
        """Compare what is stored with the record's checksums.

        Raises:
            ValueError: they differ.
        """
        if self.scratch is None or not self.scratch.resumes:
            return
        for name, band, base in self._stored():
            store, sums = self.stores[name], self.progress.sums.get(name, [])
            found = checksum(store.read(base + band.first, base + band.last))
            index = self.bands.index(band)
            if len(sums) != len(self.bands) or sums[index] != found:
                raise WholePictureError(
                    f"{self.scratch.folder / name} is damaged in rows {band.first} to {band.last}: "
                    "its checksum is another; remove the scratch folder or give another one"
                )

    def _stored(self) -> list[tuple[str, Band, int]]:
        """What later bands read: store, band, and the row at which the store's picture begins."""
        step, done = self.progress.sweep - 1, self.progress.bands
        if step < 0:
            return [(TOKENS, band, self._base(0)) for band in self.bands[:done]]
        if step == len(self.steps):
            return [(TOKENS, band, self._base(len(self.blocks))) for band in self.bands]
        index, sweep = self.steps[step]
        order = self.bands[::-1] if sweep.descending else self.bands
        if sweep.writes == TOKENS:
            found = [(TOKENS, band, self._base(index + 1)) for band in order[:done]]
            found += [(TOKENS, band, self._base(index)) for band in order[done:]]
            if self.blocks[index].side_width:
                found += [(SIDE, band, 0) for band in order[done:]]
            return found
        found = [(TOKENS, band, self._base(index)) for band in order]
        if sweep.writes == SIDE:
            found += [(SIDE, band, 0) for band in order[:done]]
        return found
