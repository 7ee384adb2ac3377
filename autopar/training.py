"""The training loop of `autopar train`, as one rank runs it.

In:  a model, a plan, options. Out: lines of output, metrics, and in `--out` checkpoints and at the end a model folder.

    OUT/step-00000100/    checkpoints (runtime/checkpoint.py)
    OUT/plan.json         the plan
    OUT/model/            at the end, for a Transformers model: what `from_pretrained` and `autopar generate` load
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar import api
from autopar.adapter import check_base, export_at_end, note_of
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.data import Ahead
from autopar.errors import PlanError, UsageError
from autopar.export import CONFIG, export_model, tokenizer_files
from autopar.models.lora import Lora, with_lora
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.plans import Plan
from autopar.profiling import StepProfiler, parse_steps
from autopar.runtime.checkpoint import (
    first_only,
    has_checkpoint,
    load_checkpoint,
    newest,
    newest_whole,
    read_about,
    step_folder,
)
from autopar.runtime.checkpoint_state import Extra
from autopar.runtime.ema import Ema
from autopar.runtime.groups import leave, wait_for_all
from autopar.runtime.launch import StopRequest, attempt
from autopar.runtime.monitor import Monitor, MonitorOptions
from autopar.runtime.optimizers import OptimizerSettings
from autopar.runtime.saving import SavePolicy, Saver, mean_time_between_failures
from autopar.runtime.schedules import Schedule
from autopar.runtime.trainer import StepResult
from autopar.training_data import batches

MODEL_FOLDER = "model"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `autopar train` that are not the plan's. `steps`: the step to train up to; `max_norm` 0: gradients are
    not clipped; `save_every`, `keep`, `async_save`, `mtbf_hours`: as in SavePolicy; `verify`: checkpoints' checksums when
    resuming; `export`: a model folder at the end; `lora`: as `Lora.parse` reads it; `packing`: as in Stream."""

    steps: int
    optimizer: OptimizerSettings
    schedule: Schedule
    ema: float | None
    max_norm: float
    data: str
    tokenizer: Path | None
    seed: int
    out: Path | None
    save_every: int | None
    resume: bool
    compiled: bool
    timeout_s: float
    as_json: bool
    quiet: bool
    keep: int = 3
    async_save: bool | None = None
    mtbf_hours: float | None = None
    verify: bool = True
    export: bool = True
    tensorboard: Path | None = None
    metrics_port: int | None = None
    live: bool = False
    profile: str | None = None
    lora: str | None = None
    packing: str = "cut"


def train_rank(model: str, plan: Plan, options: TrainOptions, tell_result: Callable[[str], None]) -> int:
    """Train up to `options.steps`, from the newest whole checkpoint if asked or restarted; rank 0 tells a line per step.

    Returns the exit code: 0, or EXIT_STOPPED where SIGTERM asked for an end and a checkpoint was written.
    """
    if options.profile is not None:
        parse_steps(options.profile)
    base = find_model(model)
    lora = Lora.parse(options.lora, seed=options.seed) if options.lora is not None else None
    source = base if lora is None else with_lora(base, lora)
    batch_of = batches(
        source,
        plan,
        data=options.data,
        tokenizer=options.tokenizer,
        seed=options.seed,
        packing=options.packing,
    )  # before the model is built: what is wrong with the data is told at once
    torch.manual_seed(options.seed)  # every rank builds the same random weights, where a model has no others
    run = api.compile(source, plan=plan, compiled=options.compiled)
    run.start(
        optimizer=options.optimizer,
        schedule=options.schedule,
        ema=options.ema,
        max_norm=options.max_norm or None,
        timeout_s=options.timeout_s,
    )
    try:
        return _Training(source, plan, options, run, batch_of, tell_result, base, lora).train()
    finally:
        batch_of.close()
        leave()


def check_fresh(out: Path) -> None:
    """Raise UsageError if a run that does not resume would mix its checkpoints with those of another one."""
    if has_checkpoint(out):
        step = read_about(out)["step"]
        raise UsageError(
            f"the folder has checkpoints of a run, the newest of step {step}",
            where=str(out),
            hint="--resume to go on from there, or another folder for a new run",
        )


class _Training:
    """A run on one rank. `position`: sequences seen so far. `note`: of a LoRA run's base and adapters."""

    def __init__(
        self,
        source: ModelSource,
        plan: Plan,
        options: TrainOptions,
        run: Compiled,
        batch_of: Ahead,
        tell_result: Callable[[str], None],
        base: ModelSource,
        lora: Lora | None,
    ) -> None:
        self.source, self.plan, self.options, self.run = source, plan, options, run
        self.batch_of, self.tell_result = batch_of, tell_result
        self.trainer = run.trainer
        self.first = self.trainer.groups.rank == 0
        self.position = 0
        self.base, self.lora = base, lora
        self.note: dict[str, Any] = {}
        if lora is not None and options.out is not None:
            self.note = {
                **first_only(lambda: note_of(base, lora)),
                "base_source": str(base.path or base.name),
            }

    def say(self, text: str) -> None:
        if self.first and not self.options.quiet:
            print(text, file=sys.stderr, flush=True)

    def train(self) -> int:
        options = self.options
        resumed = self._resume()
        if self.trainer.step_count >= options.steps:
            self.say(
                f"nothing to do: the checkpoint is of step {self.trainer.step_count}, --steps is {options.steps}"
            )
            if options.out is not None:  # of a run that died between its last checkpoint and this
                self._export(newest(options.out), options.out / MODEL_FOLDER, replace=False)
            return 0
        saver = self._saver()
        stop = StopRequest(self.trainer.groups.rank) if saver is not None else nullcontext()
        with stop as asked, self._monitor(resumed) as monitor:
            try:
                stopped = self._steps(monitor, saver, asked)
                self._end(monitor, saver, stopped)
                wait_for_all()
            except BaseException:
                if saver is not None:
                    saver.abandon()
                raise
            return asked.code() if stopped and asked is not None else 0

    # ---- before the first step -----------------------------------------------------------------------------------

    def _resume(self) -> bool:
        """Go on from the newest whole checkpoint, if that is asked for or the run was restarted."""
        out, again = self.options.out, attempt()
        if out is None or not (self.options.resume or again):
            if out is not None:
                first_only(lambda: check_fresh(out))
            return False
        chosen = newest_whole(out, self.say, verify=self.options.verify)
        if chosen is None:
            self.say(f"there is no checkpoint in {out} yet: starting at step 0")
            return bool(again)
        self._check_model(read_about(chosen), chosen)
        check_base(read_about(chosen), self.note, chosen)
        about = load_checkpoint(chosen, self.trainer, verify=False, extra=self._averages())
        self.position = int(about.get("sequences", self.trainer.step_count * self.plan.data.batch))
        if about.get("seed", self.options.seed) != self.options.seed:
            self.say(
                f"the checkpoint's data was in the order of --seed {about['seed']}, from here on it is that of "
                f"--seed {self.options.seed}: some of it comes twice, some not at all"
            )
        self.say(f"going on from the checkpoint of step {self.trainer.step_count} in {chosen}")
        return True

    def _check_model(self, about: Mapping[str, Any], folder: Path) -> None:
        expected = self.plan.model.fingerprint
        if about.get("fingerprint", expected) != expected:
            raise PlanError(
                f"the checkpoint is of another model: {about.get('model')}, the plan is for {self.plan.model.name}",
                where=str(folder),
                hint="the checkpoint of a run of this model, or another --out",
            )

    def _saver(self) -> Saver | None:
        options, out = self.options, self.options.out
        if out is None:
            return None
        cluster = Cluster.from_dict(self.plan.cluster)
        mtbf_s, source = mean_time_between_failures(
            cluster.device_count, cluster.failures_per_device_hour, options.mtbf_hours
        )
        policy = SavePolicy(
            every=options.save_every,
            keep=options.keep,
            asynchronous=options.async_save,
            mtbf_s=mtbf_s,
            mtbf_source=source,
            write_gbps=cluster.checkpoint_gbps,
        )
        files = {"plan.json": self.plan.to_json()}
        config: Any = self.source.config
        if hasattr(config, "to_json_string"):
            files[CONFIG] = config.to_json_string(use_diff=False)
        saver = Saver(
            self.trainer, out, policy, about=self._about, files=files, extra=self._averages,
            trained_only=self.lora is not None, say=self.say,
        )  # fmt: skip
        if self.first:
            self.plan.save(out / "plan.json")
        return saver

    def _averages(self) -> Extra:
        """The averaged weights, saved beside the optimizer's state."""
        ema = self.trainer.ema
        return {} if ema is None else {Ema.FIELD: ema.tensors()}

    def _about(self) -> dict[str, Any]:
        """What training.json says, beside the format and the step."""
        path = self.options.tokenizer or self.source.path
        return {
            "model": self.plan.model.name,
            "fingerprint": self.plan.model.fingerprint,
            "mesh": self.plan.mesh,
            "seed": self.options.seed,
            "sequences": self.position,
            "source": None if path is None else str(path.absolute()),
            "time": time.time(),
            **self.note,
        }

    def _monitor(self, resumed: bool) -> Monitor:
        options = self.options
        about = MonitorOptions(
            out=options.out,
            tensorboard=options.tensorboard,
            metrics_port=options.metrics_port,
            live=options.live,
            timeout_s=options.timeout_s,
        )
        return Monitor(self.plan, self.trainer, about, resumed=resumed, say=self.say)

    # ---- the steps -----------------------------------------------------------------------------------------------

    def _steps(self, monitor: Monitor, saver: Saver | None, asked: StopRequest | None) -> bool:
        """Train to the last step; whether an end was asked for before."""
        profiler = StepProfiler(self.run, self.options.profile, until=self.options.steps, say=self.say)
        while self.trainer.step_count < self.options.steps:
            began = time.perf_counter()
            with monitor.step(), profiler.step(self.trainer.step_count + 1):
                with monitor.doing("data"):
                    batch = self.batch_of.get(self.trainer.step_count, self.position)
                with monitor.doing("compute"):
                    result = self.run.train_step(batch)
                monitor.result(result)
                self.position += self.plan.data.batch
                self._tell(result, time.perf_counter() - began)
                if saver is not None and asked is not None:
                    with monitor.doing("checkpoint"):
                        last = self.trainer.step_count >= self.options.steps
                        if not last and saver.after_step(stop=asked.asked):
                            return True
        return False

    def _tell(self, result: StepResult, seconds: float) -> None:
        if result.skipped is not None:
            self.say(result.skipped)
        if not self.first or self.options.live:
            return
        if self.options.as_json:
            line = {
                "step": result.step, "loss": result.loss, "gradient_norm": result.gradient_norm, "seconds": seconds,
            }  # fmt: skip
            self.tell_result(json.dumps(line))
            return
        tokens = self.plan.data.batch * self.plan.data.seq / seconds
        self.tell_result(
            f"step {result.step:4d}  loss {result.loss:.6f}  gradient norm {result.gradient_norm:8.4f}"
            f"  {seconds:6.2f} s  {tokens:8.0f} tokens/s"
        )

    # ---- after the last step -------------------------------------------------------------------------------------

    def _end(self, monitor: Monitor, saver: Saver | None, stopped: bool) -> None:
        if saver is None:
            return
        with monitor.doing("checkpoint"):
            saver.finish()
            folder = step_folder(saver.folder, self.trainer.step_count)
            if stopped:
                self.say(
                    f"an end was asked for (SIGTERM): checkpoint of step {self.trainer.step_count} written to {folder}; "
                    "the same command with --resume goes on"
                )
                return
            self.say(f"checkpoint written to {folder}")
            self._export(folder, saver.folder / MODEL_FOLDER)

    def _export(self, checkpoint: Path, target: Path, *, replace: bool = True) -> None:
        if not self.options.export or not hasattr(self.source.config, "to_json_string"):
            return
        if self.lora is not None:
            if export_at_end(checkpoint, target, self.base, self.lora, replace=replace):
                self.say(f"adapter written to {target}")
            return
        if first_only(target.exists) and not replace:
            return
        files = tokenizer_files(self.options.tokenizer or self.source.path)
        export_model(checkpoint, target, self.source, files=files, replace=True, seed=self.options.seed)
        self.say(f"model written to {target}")
