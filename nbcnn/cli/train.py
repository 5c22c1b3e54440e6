"""nbcnn train: flags → data, net, session → Trainer."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

from nbcnn.cli import recipes, train_flags
from nbcnn.cli.flags import check_device
from nbcnn.cli.part import Part
from nbcnn.cli.phases import Phases
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.cli.together import together
from nbcnn.files import user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.suggest import called
from nbcnn.plan.names import FITTED

if TYPE_CHECKING:
    from nbcnn.ranks.team import Team

STARTED = time.perf_counter()


def train(given: SimpleNamespace, team: Team, held: ExitStack, part: Part | None = None) -> int:
    """Run the training that the flags describe, as one rank of `team`; returns the exit code. The run folder is this program's until `held` ends.

    `part` takes its results where it is one of several; the next part gets the data set, None of a series.
    """
    from nbcnn.gpu import driver
    from nbcnn.gpu.select import use_device

    if given.device and team.size == 1:
        use_device(given.device)
    if given.mode != "cpu" and given.device != "cpu":
        driver.open_ahead()  # beside the imports below
    part = part or Part(Phases(STARTED))
    phases = part.phases
    from nbcnn.cli import loading, own_model, train_run

    if given.device and team.size > 1:
        raise UsageError("--device is for one process: of several ranks each takes the GPU of its number")
    start = train_run.start(given, held, team.leads)
    flags = start.flags
    check_device(given.device, flags.mode)
    flags.quiet = flags.quiet or not team.leads
    callbacks = recipes.own_callbacks(flags.callback) if team.leads else []
    own = own_model.function_of(flags.model) if own_model.is_own(flags.model) else None  # before anything is read or downloaded
    phases.mark("flags")
    from nbcnn.run.rows import choose_mode

    phases.mark("imports")
    choice = choose_mode(flags.mode, flags.precision, flags.engine, dwconv=flags.dwconv, strict=flags.strict)
    row = choice.row
    phases.mark("opening the GPU" if row.device == "gpu" else "choosing the mode")
    note = "" if row.device == "gpu" else recipes.on_cpu(flags)  # before another thread reads the flags
    read = loading.reading(flags) if team.size == 1 else None  # beside the imports below; of several ranks the first reads first
    from nbcnn.cli import describe, train_data, train_fitted
    from nbcnn.gpu import compile_pool, ranges
    from nbcnn.run.net import Net
    from nbcnn.run.session import TrainingSession
    from nbcnn.train.callbacks import EarlyStopping, Progress
    from nbcnn.train.trainer import Trainer

    def say(text: str, always: bool = False) -> None:
        if text and (always or not flags.quiet):
            to_stderr(text)

    phases.mark("imports")
    if flags.model in FITTED:
        choice = train_fitted.choice(choice, flags)
        row = choice.row
    if row.device == "gpu":
        compile_pool.warm_up_if_empty()  # workers import the compiler beside what follows
    say(note, always=team.leads)
    with team.first_on_machine():
        data = train_data.material(flags, read, own)
    say(data.note, always=team.leads)
    part.check(data)
    phases.mark("reading the data")
    rates, identity = train_run.rates(flags, data.count), train_run.identity(flags, data, row)
    optimizer, streaming = train_run.optimizer(flags), train_data.streaming(flags)  # the last files of the user's to be loaded
    decided = json.dumps([row.mode, row.precision, identity, vars(flags) | {"quiet": None}], default=str).encode()
    team.agree(user_code.hashes() | {"mode, flags or data": decided})  # a file first: it may be why data differ
    net = Net(
        data.layers,
        data.shape,
        choice=choice,
        fusing=not flags.no_fuse,
        seed=flags.seed,
        init=train_fitted.random_init(flags),
        strict=flags.strict,
        normalisation=data.normalisation,
    )
    tiles, weights = start.tiles(net.mode, net.precision, net.device_name), train_run.take_weights(net, start)
    net.tiles.update(tiles)
    phases.mark("the network")
    say(describe.compiling(net))
    if flags.model in FITTED:
        return train_fitted.fitted(start, data, net, identity, team, held, say, STARTED)
    if not start.checkpoint and not flags.explain:
        train_fitted.prepare(net, data, flags, say)
        phases.mark("fitting layers to the images")
    tune = None
    if flags.tune and not tiles:
        from nbcnn.run import autotune

        tune = autotune.tune
    session = TrainingSession(
        net,
        data.train,
        optimizer=optimizer,
        learning_rates=rates,
        batch=flags.batch,
        seed=flags.seed,
        flip=flags.flip,
        test_images=data.test,
        labels=data.labels,
        test_labels=data.test_labels,
        say=say,
        tune=tune,
        team=team,
        sync_stats=flags.sync_stats,
        factors=train_run.factors(flags, net),
        accumulate=flags.accumulate,
        ema=flags.ema,
        recompute=flags.recompute,
        phase=phases.mark,
        **streaming,
    )
    if flags.nvtx:
        session.mark = ranges.nvtx() or ranges.nothing
        if session.mark is ranges.nothing:
            say(ranges.MISSING)
    if flags.explain:
        if team.leads:
            to_stdout(describe.explanation(session))
        return 0

    run = train_run.claimed(start, data, net.mode, held) if team.leads else start.folder or "runs"
    progress = [] if flags.quiet else [Progress(every_reading=flags.log_every > 0, noun=data.noun, every_time=flags.verbose)]
    pictures = data.pictures(f"{data.short}, {flags.model}, {net.mode} {net.precision}", net)
    pictures.behind = part.behind
    trainer = Trainer(
        session,
        run,
        learning_rates=rates,
        log_every=flags.log_every,
        save_every=flags.save_every,
        identity=identity,
        notes=train_run.notes(net, session, data),
        callbacks=[*progress, *([EarlyStopping(flags.patience)] if flags.patience else []), *callbacks, pictures],
        scores=pictures.scores,
        team=team,
    )
    if start.checkpoint:
        warnings = trainer.resume(start.checkpoint, new_epochs="epochs" in flags.given)
        if trainer.epochs_done >= flags.epochs:
            more = called("train", "--resume", trainer.run.path, "--epochs", flags.epochs + 1)
            trained = "its 1 epoch is" if flags.epochs == 1 else f"all {flags.epochs} epochs are"
            say(f"{trainer.run.path} is complete: {trained} trained. More: {more}")
        for line in [*warnings, *train_run.other_compilers(start, net.device_name), *train_run.other_threads(start, net.mode)]:
            say(f"nbcnn: warning: {line}", always=team.leads)
    elif team.leads:
        trainer.run.rewrite([])  # of a run that was killed before its first checkpoint
        trainer.run.write_config(train_run.config(flags, data, net, session, weights))
    phases.mark("the run folder")
    ready = time.perf_counter() - STARTED
    say(recipes.of_batch(flags))
    say(describe.header(flags, data, session, trainer.run, ready))
    if flags.verbose:
        say(phases.text())
    part.ready(net, data, session.compiled)
    before, result = trainer.step, trainer.fit()
    phases.mark("training")
    session.close()
    if team.leads:
        if result.step > before:
            train_run.record_memory(trainer.run, net)
            if words := train_run.no_better(flags, data, net, trainer.rows):
                say(f"nbcnn: warning: {words}", always=True)
        about = (pictures, trainer.scored)
        text = "" if flags.json else describe.summary(result, data, session, trainer.run, *about)
        part.results(describe.results(result, data, session, trainer.run, ready, *about), text, flags.json, data.data)
    phases.mark("what ends it")
    return result.exit_code


def main(argv: list[str] | None = None) -> int:
    """Parse `argv` and train; returns the exit code."""
    given = train_flags.parse(argv)

    def run(team: Team) -> int:
        with ExitStack() as held:
            return train(given, team, held)

    return together(run)
