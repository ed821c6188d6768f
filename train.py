"""Train a GPT with any position scheme, and measure it at and past its training length.

python train.py pos=rope                            what this machine can do: preset=cpu or preset=gpu
python train.py -m pos=learned,rope seed=0,1        four runs, one after the other
torchrun --nproc-per-node 2 train.py pos=rope       data parallel: the same run on two devices
python train.py resume=outputs/<run>                go on with an interrupted run
"""

import contextlib
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path

import hydra
import numpy as np
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import interpolate
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import runs
import speed
from data import DataConfig, TokenFiles, Tokenizer, absolute, draw_batch, get_tokenizer, prepare
from eval import default_lengths, default_stride, log_curve
from measure.protocols import new_losses
from measure.report import Report
from measure.results import Job, Scoring
from measure.tables import with_error
from model import GPT, GPTConfig
from model.checkpoint import (
    latest_checkpoint,
    load_run,
    load_state,
    load_weights,
    read_config,
    save_checkpoint,
    write_text,
)

log = logging.getLogger("ropewalk")
IMPORTS = speed.seconds_since_launch()

ConfigStore.instance().store(name="train_schema", node=runs.TrainConfig)

# What may differ from the run that is resumed; all else comes from its config.yaml.
RESUMABLE = {"resume", "device", "wandb.mode", "train.max_steps", "train.eval_every", "train.checkpoint_every"}


def resumed_config(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration of the run to resume, with the few settings that may change taken from the command line."""
    saved, _ = runs.read_run(Path(config.resume).expanduser())
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        if key not in RESUMABLE:
            raise ValueError(
                f"{key}: cannot change when a run is resumed (resume={config.resume}), its config.yaml decides; "
                f"only {', '.join(sorted(RESUMABLE))} can. To start anew from its weights: init_from=<run folder>"
            )
        OmegaConf.update(saved, key, OmegaConf.select(config, key))
    return runs.checked(saved, runs.TrainConfig)


def from_source(config: DictConfig) -> DictConfig:
    """Where a run starts from another's weights under a scaling, its formulas start from that one's length."""
    scaled = config.scaling is not None and config.scaling.get("name") != "none"
    if config.init_from and scaled and config.model.get("original_length") is None:
        source = latest_checkpoint(Path(config.init_from).expanduser())
        config.model.original_length = read_config(source).original_length
    return config


def check_settings(config: DictConfig, ranks: runs.Ranks) -> GPTConfig:
    """Everything that can be known to be wrong before any work is done. Raises ValueError naming the setting."""
    t, v = config.train, config.val
    least = {"max_steps": 1, "batch_size": 1, "micro_batch_size": 1, "warmup_steps": 0, "weight_decay": 0}
    least |= {"eval_every": 1, "checkpoint_every": 1, "log_every": 1, "min_lr_ratio": 0, "beta1": 0, "beta2": 0}
    runs.require(config, {f"train.{key}": low for key, low in least.items()} | {"val.stride": 1, "val.max_targets": 1})
    runs.require(config, {"seed": 0})
    runs.wandb_mode(config.wandb.mode)
    if config.seed >= 2**63:
        raise ValueError(f"seed={config.seed}: must be below 2^63")
    for key in ("lr", "grad_clip"):
        if not 0 < t[key] < math.inf:
            raise ValueError(f"train.{key}={t[key]}: must be a finite number above 0")
    for key in ("beta1", "beta2"):
        if t[key] >= 1:
            raise ValueError(f"train.{key}={t[key]}: must be below 1")
    if t.peak_flops is not None and not 0 < t.peak_flops < math.inf:
        raise ValueError(f"train.peak_flops={t.peak_flops}: must be a finite number above 0, or null")
    if config.profile and t.max_steps < 5:
        raise ValueError(f"profile=true records steps 3 to 5, train.max_steps={t.max_steps}: must be at least 5")
    if t.compile not in (True, False):
        raise ValueError(f"train.compile={t.compile!r}: use true or false")
    if not v.multiples or min(v.multiples) <= 0:
        raise ValueError(f"val.multiples={list(v.multiples)}: at least one, all above 0")
    if t.batch_size % (ranks.world_size * (t.micro_batch_size or 1)):
        raise ValueError(
            f"train.batch_size={t.batch_size}: must be a multiple of train.micro_batch_size={t.micro_batch_size} "
            f"times the number of processes, {ranks.world_size}"
        )
    if config.init_table not in (None, "interpolate"):
        raise ValueError(f"init_table={config.init_table!r}: use interpolate, or null to refuse")
    plain, vocab_size = OmegaConf.to_container(config), get_tokenizer(**config.tokenizer).vocab_size
    return GPTConfig.from_dict(plain["model"], vocab_size=vocab_size, pos=plain["pos"], scaling=plain["scaling"])


def check_lengths(config: DictConfig, files: TokenFiles) -> list[int]:
    """The lengths to evaluate. ValueError where a split is shorter than a training window; longer ones are left out."""
    train_length = config.model.train_length
    for split, tokens in (("training", files.train), ("validation", files.val)):
        if len(tokens) < train_length + 1:
            raise ValueError(
                f"model.train_length={train_length}: a window and its target do not fit into the {split} split of "
                f"{files.meta['corpus']}, which has {len(tokens)} tokens; use a shorter one or more text"
            )
    lengths = default_lengths(train_length, [1, *config.val.multiples])
    fitting = [length for length in lengths if length < len(files.val)]
    if fitting != lengths:
        left_out = ", ".join(str(length) for length in lengths if length not in fitting)
        log.warning("validation split of %d tokens: lengths %s are left out", len(files.val), left_out)
    if config.val.stride is not None and config.val.stride > min(fitting):
        raise ValueError(f"val.stride={config.val.stride}: must be at most the shortest length, {min(fitting)}")
    return fitting


def lr_at(step: int, t: DictConfig) -> float:
    """Learning rate of update number `step`, from 0: linear warm-up, then a cosine down to min_lr_ratio · lr."""
    if step < t.warmup_steps:
        return t.lr * (step + 1) / t.warmup_steps
    progress = (step - t.warmup_steps) / max(1, t.max_steps - 1 - t.warmup_steps)
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class Trainer:
    """One run: model, optimiser and data, from the step its last checkpoint was written at to max_steps."""

    def __init__(self, config: DictConfig, gpt_config: GPTConfig, folder: Path, ranks: runs.Ranks):
        self.config, self.folder, self.ranks = config, folder, ranks
        self.launched: float | None = time.perf_counter()
        self.device = runs.pick_device(config.device, ranks.local_rank)
        self.precision = runs.pick_precision(config.precision, self.device)
        torch.set_float32_matmul_precision("high" if config.train.tf32 and self.device.type == "cuda" else "highest")
        if config.preset == "gpu" and self.device.type != "cuda":
            log.warning("preset=gpu is meant for a CUDA device, and this run uses %s: expect days", self.device)
        found = "a CUDA device is here" if torch.cuda.is_available() else "no CUDA device here"
        log.info("preset   %s (%s)", config.preset, found)
        log.info("device   %s, %s, %d process(es)", self.device, self.precision, ranks.world_size)

        self.tokenizer: Tokenizer = get_tokenizer(**config.tokenizer)
        data_config = DataConfig(**config.data)
        if ranks.first:
            prepare(data_config, self.tokenizer, say=log.info)
        ranks.share(None)  # the others wait for the files
        self.files = prepare(data_config, self.tokenizer, say=log.info)
        corpus, tokens, documents = (self.files.meta[key] for key in ("corpus", "tokens", "documents"))
        log.info(
            f"data     {corpus}: {tokens['train']:,} training and {tokens['val']:,} validation tokens in "
            f"{documents['train']} and {documents['val']} documents, fingerprint {self.files.fingerprint}"
        )
        self.lengths = check_lengths(config, self.files)

        self.step, state = 0, {}
        if config.resume:
            weights = latest_checkpoint(folder)
            self.model, state = load_weights(weights), load_state(weights)
            self._check_resumable(state)
            self.step = state["step"]
        else:
            torch.manual_seed(config.seed)
            self.model = GPT(gpt_config)
            if config.init_from:
                self._start_from(Path(config.init_from).expanduser())
        self.model.to(self.device).train()
        self._say_model()
        peak = speed.peak_flops(self.device, config.train.peak_flops)
        self.peak = peak and peak * ranks.world_size
        self.flops = 3 * self.model.flops_per_token(config.model.train_length)  # backward: twice the forward pass
        t, groups = config.train, self.model.optimizer_groups(config.train.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        if state:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
        self.wandb_id = state.get("wandb_id")
        if self.wandb_id is None and runs.wandb_mode(config.wandb.mode) != "disabled":
            self.wandb_id = runs.new_wandb_id()

        self.forward = torch.compile(self.model) if t.compile is True else self.model
        if ranks.world_size > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            self.forward = torch.nn.parallel.DistributedDataParallel(self.forward, device_ids=devices)

    def _check_resumable(self, state: dict) -> None:
        if state["fingerprint"] != self.files.fingerprint:
            raise ValueError(
                f"resume={self.folder}: was trained on data {state['fingerprint']}, but {self.files.meta['corpus']} is "
                f"{self.files.fingerprint} here; going on would mix the two"
            )
        if state["step"] >= self.config.train.max_steps and (self.folder / "extrapolation.json").exists():
            raise ValueError(f"resume={self.folder}: its {state['step']} steps are done; raise train.max_steps")

    def _start_from(self, source: Path) -> None:
        """Another run's weights. ValueError where they would mean something else here, even if their shapes fit."""
        start = load_run(source)
        other, ours = asdict(start.config), asdict(self.model.config)
        free = {"train_length", "original_length", "scaling", "dropout"}
        for config in (other, ours):
            config["pos"].pop("base", None)
        differing = [key for key in ours if key not in free and ours[key] != other[key]]
        if differing:
            settings = ", ".join(f"{key}={other[key]} there, {ours[key]} here" for key in differing)
            raise ValueError(f"init_from={source}: its weights are those of another model: {settings}")
        weights, rows, found = start.state_dict(), self.model.config.train_length, start.config.train_length
        if ours["pos"]["name"] == "learned" and rows != found:  # all other shapes are equal by now
            if self.config.init_table != "interpolate":
                way_out = "init_table=interpolate stretches a learned table"
                raise ValueError(f"init_from={source}: its table has {found} rows, not {rows}; {way_out}")
            # The first and last rows stay the ends, those between are linear mixtures of their two neighbours.
            table = weights["pos.table"].T[None]  # (1, D, rows)
            weights["pos.table"] = interpolate(table, size=rows, mode="linear", align_corners=True)[0].T
        self.model.load_state_dict(weights)
        log.info("weights  from %s", source)

    def _say_model(self) -> None:
        c = self.model.config
        of_scheme = sum(parameter.numel() for parameter in self.model.pos.parameters())
        log.info(
            f"model    {c.pos['name']}: {self.model.num_parameters():,} parameters ({of_scheme:,} for positions), "
            f"{c.n_layer} layers, {c.n_head} heads of {c.head_dim}, train length {c.train_length}, "
            f"{self.model.flops_per_token(c.train_length) / 1e6:.1f} MFLOP a token forward"
        )

    def _write_config(self) -> dict:
        """config.yaml: the settings as used, and where they were used. Refuses a folder that holds a run already."""
        path = self.folder / "config.yaml"
        plain = OmegaConf.to_container(self.config, throw_on_missing=True)
        plain["resume"] = None
        here = {**runs.provenance(), "device": str(self.device), "precision": self.precision}
        here |= {"fingerprint": self.files.fingerprint, "wandb_id": self.wandb_id}
        if self.config.resume:
            origin = runs.read_run(self.folder)[1]
            here = {**origin, "wandb_id": self.wandb_id, "resumed": [*origin.get("resumed", []), here]}
        plain["provenance"] = here
        try:
            write_text(path, OmegaConf.to_yaml(OmegaConf.create(plain)), new=not self.config.resume)
        except FileExistsError as error:
            raise ValueError(f"{self.folder}: holds a run already; resume= it, or choose another folder") from error
        return plain

    def train(self) -> float:
        """Train to the end; returns the validation loss at the training length (nats a token)."""
        t, step_tokens = self.config.train, self.config.train.batch_size * self.config.model.train_length
        with contextlib.ExitStack() as outputs:
            if self.ranks.first:
                self._open_outputs(outputs)
            hidden = None if self.ranks.first else True  # None: where the output is no terminal
            bar = tqdm(total=t.max_steps, initial=self.step, unit="step", smoothing=0.05, disable=hidden)
            outputs.enter_context(bar)
            outputs.enter_context(logging_redirect_tqdm([logging.getLogger()]))
            profiled = self.config.profile and self.ranks.first
            profiler = outputs.enter_context(speed.profiler(self.folder, self.device)) if profiled else None
            nll, pending, start, clock = math.nan, [], {}, time.perf_counter()
            while self.step < t.max_steps:
                pending.append(self._update())
                self.step += 1
                bar.update()
                if profiler:
                    profiler.step()
                if self.launched is not None:
                    float(pending[0][1])  # on a GPU, the step is done only when its loss is there
                    start = {"speed/seconds_to_first_step": IMPORTS + time.perf_counter() - self.launched}
                    log.info("start    %.1f s from launch to the end of the first step", *start.values())
                    self.launched = None
                at_end = self.step == t.max_steps
                evaluate = self.step % t.eval_every == 0 or at_end
                checkpoint = self.step % t.checkpoint_every == 0 or at_end
                if not (self.step % t.log_every == 0 or evaluate or checkpoint):
                    continue
                row = self._read(pending)
                rate = len(pending) * step_tokens / (time.perf_counter() - clock)
                bar.set_postfix_str(f"loss {row['train/loss']:.3f}, {rate:,.0f} tokens/s", refresh=False)
                mfu = None if self.peak is None else rate * self.flops / self.peak
                self._record({**row, **start, "speed/tokens_per_second": rate, "speed/mfu": mfu})
                # In this order a killed run measures again what it resumes before; the last weights come first of all.
                if at_end:
                    self._checkpoint()
                if evaluate:
                    nll = self._evaluate(last=at_end)
                if checkpoint and not at_end:
                    self._checkpoint()
                pending, start, clock = [], {}, time.perf_counter()
            if math.isnan(nll):  # resumed after its last step, before its report
                nll = self._evaluate(last=True)
        return self.ranks.share(nll)

    def _open_outputs(self, outputs: contextlib.ExitStack) -> None:
        c = self.config
        about = {**runs.wandb_identity(c), "config": self._write_config()}
        self.metrics = runs.MetricsFile(self.folder / "metrics.jsonl", self._is_kept)
        self.wandb = runs.start_wandb(c.wandb, self.folder, self.wandb_id, **about)
        outputs.push(lambda kind, error, trace: self.wandb.finish(failed=kind is not None))

    def _is_kept(self, row: dict) -> bool:
        """Whether a row of metrics.jsonl was written before the checkpoint this run goes on from."""
        measured_again = self.step == self.config.train.max_steps and "train/loss" not in row
        return row["step"] < self.step or (row["step"] == self.step and not measured_again)

    def _update(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """One optimiser step over the global batch: (step, its mean loss, the gradient's norm), still on the device."""
        c, t = self.config, self.config.train
        # All randomness of a step is a function of (seed, step, rank): a resumed run needs no generator states.
        torch.manual_seed(int(np.random.SeedSequence([c.seed, self.step, self.ranks.rank]).generate_state(1)[0]))
        lr = lr_at(self.step, t)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        where = (c.seed, self.step, self.ranks.rank, self.ranks.world_size)
        batch = draw_batch(self.files.train, c.model.train_length, t.batch_size, *where)
        inputs, targets = map(self._to_device, batch)  # (B, T) each, B this process' share of the batch
        micro = t.micro_batch_size or len(inputs)
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        loss = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(parts):
            sync = i == len(parts) - 1 or self.ranks.world_size == 1
            with contextlib.nullcontext() if sync else self.forward.no_sync():
                with runs.autocast(self.device, self.precision):
                    nll = self.forward(x, targets=y)  # (micro, T)
                # A part's share of the mean over the global batch: the parts add up to one big batch, whatever their
                # number. The factor undoes DistributedDataParallel's mean over processes.
                part = nll.sum() / (t.batch_size * c.model.train_length)
                self.scaler.scale(part * self.ranks.world_size).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.step, loss, norm

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def _read(self, pending: list[tuple[int, torch.Tensor, torch.Tensor]]) -> dict:
        """The losses since the last call, fetched all at once. ValueError if one, or its gradient, is not finite."""
        losses = torch.stack([loss for _, loss, _ in pending])
        if self.ranks.world_size > 1:
            dist.all_reduce(losses)
        norms = torch.stack([norm for _, _, norm in pending]).tolist()
        for (step, _, _), loss, norm in zip(pending, losses.tolist(), norms, strict=True):
            # fp16's scaler skips steps whose gradient overflows: there, only the loss has to be finite
            if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
                what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient's norm is {norm}"
                try:
                    good = f"the last good checkpoint is {latest_checkpoint(self.folder)}"
                except FileNotFoundError:
                    good = "there is no checkpoint yet"
                raise ValueError(
                    f"step {step + 1}: the {what}; {good}. Try a smaller train.lr, a longer train.warmup_steps "
                    "or precision=fp32"
                )
        loss, lr = sum(losses.tolist()) / len(pending), self.optimizer.param_groups[0]["lr"]
        return {"train/loss": loss, "train/lr": lr, "train/grad_norm": norms[-1]}

    def _evaluate(self, last: bool) -> float:
        """Validation at all lengths, by the first process; after the last step also as the run's report."""
        if not self.ranks.first:
            return math.nan
        c = self.config
        stride = c.val.stride or default_stride(c.model.train_length, self.lengths)
        scoring = Scoring(tuple(self.lengths), stride=stride, max_targets=c.val.max_targets)
        job = Job(self.model.config, self.files, self.tokenizer, scoring)
        with runs.autocast(self.device, self.precision):
            job.score(self.model, losses := new_losses(job.plan))
        about = {"run": c.name, "folder": str(self.folder), "checkpoint": f"step_{self.step:06d}"}
        about |= {"trained_on": self.files.fingerprint, "precision": self.precision}
        (measurement,) = job.measurements(losses, about)
        rows = measurement.result["rows"]
        shown = ", ".join(f"{row['length']}: {with_error(row)}" for row in rows)
        log.info("step %d  validation perplexity at %s", self.step, shown)
        at_train = measurement.row(c.model.train_length)
        curve = {f"val/perplexity_{row['length']}": row["perplexity"] for row in rows if row["nll"] is not None}
        at_length = {f"val/{key}": at_train[key] for key in ("perplexity", "bits_per_byte")}
        self._record({"val/loss": at_train["nll"], **at_length, **curve})
        if last:
            report = Report([measurement])
            report.write(self.folder, html=False)
            log_curve(measurement.result, "extrapolation/final", self._record, self.wandb)
            for line in report.text().splitlines():
                log.info("%s", line)
        return at_train["nll"]

    def _record(self, row: dict) -> None:
        if self.ranks.first:
            tokens = self.step * self.config.train.batch_size * self.config.model.train_length
            row = {"step": self.step, "tokens": tokens, **row}
            self.metrics.write(row)
            self.wandb.log(row)

    def _checkpoint(self) -> None:
        if self.ranks.first:
            state = {"step": self.step, "fingerprint": self.files.fingerprint, "wandb_id": self.wandb_id}
            state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
            save_checkpoint(self.folder, self.step, self.model, state)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    """One run; a sweeper gets its validation loss at the training length."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    with runs.clear_errors(folder):
        ranks = runs.join_processes(config.device)
        config = runs.checked(config, runs.TrainConfig)
        if config.resume:
            source = Path(config.resume).expanduser()
            if ranks.first and (source / "config.yaml").exists() and source.resolve() != folder.resolve():
                raise ValueError(f"hydra.run.dir={folder}: not together with resume=, which goes on in {source}")
            config = resumed_config(config, list(hydra_config.overrides.task))
        config = from_source(config)
        config.data = absolute(DataConfig(**config.data))
        if experiment := hydra_config.runtime.choices.get("experiment"):
            config.wandb.tags.append(f"experiment={experiment}")
        gpt_config = check_settings(config, ranks)
        trainer = Trainer(config, gpt_config, Path(ranks.share(str(folder))), ranks)
        log.info("run      %s", trainer.folder)
        try:
            return trainer.train()
        except KeyboardInterrupt:
            log.warning(
                "interrupted at step %d; to go on from its last checkpoint: resume=%s", trainer.step, trainer.folder
            )
            raise SystemExit(130) from None


if __name__ == "__main__":
    with runs.entry(runs.TrainConfig), runs.all_jobs():
        main()
