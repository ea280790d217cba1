"""Turn a Hugging Face checkpoint into a packed model.

Memory: one expert is read, packed and written at a time, and tensors are mapped rather than read,
so the process holds a few records plus at most one tensor, whatever the size of the checkpoint.

Every file gets its name only when it is whole and on the disk, and is then entered in a journal;
manifest.json comes last. So a conversion may be killed at any time: running it again checks what is
there, goes on, and ends with the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqmoe_kernels.formats import format_names
from seqmoe_weights.destination import Destination, Journal
from seqmoe_weights.errors import CheckpointError, PackedModelError, ResourceError, SeqmoeError
from seqmoe_weights.files import (
    FileHashes,
    Meter,
    Progress,
    free_disk_bytes,
    is_intact,
    naming_os_errors,
    readable_size,
    replacing,
    sync_folder,
    write_file,
    write_json,
)
from seqmoe_weights.manifest import (
    JOURNAL_FILE,
    MANIFEST_FILE,
    Manifest,
    is_predictor_file,
    layouts_as_json,
)
from seqmoe_weights.packer import QUANTIZE, Packer
from seqmoe_weights.source import Source

_SLACK_BYTES = 2**20  # journal, manifest and folder entries, besides 256 B per record


def convert(
    src: Path, dst: Path, quantize: str, force: bool, progress: Progress | None = None
) -> str:
    """Convert the checkpoint folder `src` into the packed model `dst`; see `Conversion`."""
    return Conversion(src, dst, quantize, force).run(progress)


class Conversion:
    """A conversion that has been checked and can be run."""

    def __init__(self, src: Path, dst: Path, quantize: str, force: bool) -> None:
        """Check the source, every header in it, the destination and the disk; write nothing.

        `quantize`: `keep` keeps the bits of the experts; `fp8`, or the name of any format, encodes
        BF16, F16 or F32 ones in it. `force` replaces another packed model in `dst`. Raises
        `SeqmoeError`.
        """
        if quantize not in ("keep", *QUANTIZE, *format_names()):
            raise SeqmoeError(f"--quantize {quantize!r} is not known", "use keep or fp8")
        if src.resolve() == dst.resolve():
            raise SeqmoeError(f"DST is SRC: {src}", "give another folder as DST")
        if not src.is_dir():
            raise CheckpointError(f"{src} is not a folder", "give a checkpoint folder as SRC")
        self.quantize, self._force = quantize, force
        with naming_os_errors("read", src):
            self.source = Source(src)
            self._fingerprint = self.source.fingerprint()
        small = self.source.small_files
        self._small = {name: FileHashes.of_bytes(data) for name, data in small.items()}
        self.packer = Packer(self.source, quantize)
        with naming_os_errors("read", dst):
            self.destination = Destination.inspect(dst)
            self._check_destination()
            self.free_bytes = free_disk_bytes(dst)
        self._check_disk()

    @property
    def state(self) -> str:
        """`new`, `resume` (an interrupted conversion goes on) or `check` (it is there already)."""
        if self.destination.manifest is not None:
            return "check"
        return "resume" if self.destination.journal is not None else "new"

    @property
    def total_bytes(self) -> int:
        """Size of the packed model."""
        return self.packer.num_bytes + sum(map(len, self.source.small_files.values()))

    def run(self, progress: Progress | None = None) -> str:
        """Do it. Returns `converted`, `repaired` (it was there, but damaged) or `unchanged`."""
        path = self.destination.path
        with naming_os_errors("read or write", path):
            path.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                if self.destination.manifest is not None:
                    return self._run_again(self.destination.manifest, progress)
                return self._run_new(progress)

    def _run_new(self, progress: Progress | None) -> str:
        journal = self.destination.journal
        if journal is None:
            journal = Journal(self.quantize, self._fingerprint)
            journal.write(self.destination.path)
        self.destination.remove_all_but({JOURNAL_FILE, *journal.finished})
        self._write_files(journal, Meter(self.packer.num_bytes, progress))
        return "converted"

    def _run_again(self, manifest: Manifest, progress: Progress | None) -> str:
        """Over a whole packed model: make sure that it is of this source, and intact."""
        meter = Meter(self.packer.source_bytes + self.packer.num_bytes, progress)
        for name in self.packer.file_names:
            if self.packer.hash_source(name, meter) != manifest.source.get(name):
                raise self._refusal("holds a model that was converted from other weights")
        finished = {name: manifest.files[name] for name in self.packer.file_names}
        journal = Journal(self.quantize, self._fingerprint, finished, dict(manifest.source))
        return "repaired" if self._write_files(journal, meter) else "unchanged"

    def _write_files(self, journal: Journal, meter: Meter) -> int:
        """Write what is not there intact, then the manifest. Returns how many files that were."""
        path, num_written = self.destination.path, 0
        for name in self.packer.file_names:
            known = journal.finished.get(name)
            if known is not None:
                if is_intact(path / name, known, meter):
                    continue
                meter.total_bytes += known.num_bytes
            with replacing(path / name) as file:
                written = self.packer.write(name, file, meter)
            journal.finished[name], journal.sources[name] = written
            journal.write(path)
            num_written += 1
        for name, data in self.source.small_files.items():
            if not is_intact(path / name, self._small[name]):
                write_file(path / name, data)
                num_written += 1
        if self.source.fingerprint() != self._fingerprint:
            raise CheckpointError(
                f"{self.source.path} was changed while it was converted", "convert it again"
            )
        if num_written or not (path / MANIFEST_FILE).exists():
            sync_folder(path)
            write_json(path / MANIFEST_FILE, self._manifest(journal).as_json())
        found = Destination.inspect(path)
        assert found.manifest is not None
        # gone are journal, temporary files, and files of a larger model that was here before
        found.remove_all_but({MANIFEST_FILE, *found.manifest.files})
        return num_written

    def _manifest(self, journal: Journal) -> Manifest:
        digests = [f"{name} {digest}\n" for name, digest in journal.sources.items()]
        digests += [f"{name} {hashes.pieces[0]}\n" for name, hashes in self._small.items()]
        # the predictor of the model that is there already was trained on the same weights
        old = self.destination.manifest.files if self.destination.manifest else {}
        predictor = {name: hashes for name, hashes in old.items() if is_predictor_file(name)}
        return Manifest(
            family=self.source.config.family,
            quantize=self.quantize,
            dense_format=self.packer.dense_format,
            num_layers=self.source.config.num_hidden_layers,
            num_experts=self.source.config.num_experts,
            layout=layouts_as_json(self.packer.layouts),
            files={**journal.finished, **self._small, **predictor},
            source=journal.sources,
            source_sha256=hashlib.sha256("".join(sorted(digests)).encode()).hexdigest(),
        )

    def _check_destination(self) -> None:
        found, journal = self.destination, self.destination.journal
        if self._force:
            found.refuse_foreign_files()
            found.manifest = found.journal = None
        elif found.is_damaged:
            raise PackedModelError(
                f"{found.path / MANIFEST_FILE} is damaged or of another version",
                "give another DST, or --force to replace the model there",
            )
        elif found.manifest is not None:
            self._check_manifest(found.manifest)
        elif journal is not None and journal.quantize != self.quantize:
            raise self._refusal(
                f"holds an unfinished conversion with --quantize {journal.quantize}"
            )
        elif journal is not None and journal.fingerprint != self._fingerprint:
            raise self._refusal(
                "holds an unfinished conversion of another source, or SRC has changed since"
            )

    def _check_manifest(self, manifest: Manifest) -> None:
        """Refuse quickly, without reading weights, what is another model for certain."""
        if manifest.quantize != self.quantize:
            raise self._refusal(f"was converted with --quantize {manifest.quantize}")
        copied = {
            n: h
            for n, h in manifest.files.items()
            if n not in self.packer.file_names and not is_predictor_file(n)
        }
        if copied != self._small or not manifest.files.keys() >= set(self.packer.file_names):
            names = (n for n in {*copied, *self._small} if copied.get(n) != self._small.get(n))
            differing = min(names, default="its list of files")
            raise self._refusal(f"holds another model ({differing} differs)")

    def _refusal(self, why: str) -> SeqmoeError:
        return SeqmoeError(
            f"{self.destination.path} {why}", "give another DST, or --force to replace it"
        )

    def _check_disk(self) -> None:
        there = sum(file.stat().st_size for file in self.destination.own_files)
        slack = _SLACK_BYTES + 256 * self.source.config.num_routed_experts
        needed = self.total_bytes + slack - there
        if self.state != "check" and needed > self.free_bytes:
            raise ResourceError(
                f"not enough disk at {self.destination.path}: {readable_size(needed)} needed, "
                f"{readable_size(self.free_bytes)} free",
                "free some space, or give a DST on another disk",
            )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second conversion out of the folder. The lock goes with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SeqmoeError(
            f"another seqmoe convert is writing to {folder}", "wait until it has ended"
        ) from error
    except OSError:
        pass  # some network file systems cannot lock a folder; they do without
    try:
        yield
    finally:
        os.close(handle)
