# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga``, by name."""

from __future__ import annotations

import typer

from beluga.cli import (
    bench,
    block,
    dashboard,
    detach,
    doctor,
    gateway,
    look,
    operate,
    options,
    pool,
    prefill_worker,
    program,
    replay,
    serve,
    show_settings,
    simulate,
    size,
    stat,
    top,
    trace,
    verify,
)

app = typer.Typer(
    help="A shared KV-cache pool for LLM inference on CXL memory, or on the memory you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=options.HELP,
)
app.callback()(program.of("beluga"))
app.command()(pool.mount)
app.command()(pool.umount)
app.add_typer(pool.app, name="pool")
app.command()(serve.serve)
app.command()(detach.stop)
app.command()(serve.ping)
app.command()(stat.stat)
app.command()(trace.trace)
app.command()(operate.quota)
app.command()(operate.drain)
app.command()(top.top)
app.command()(dashboard.dashboard)
app.command()(block.put)
app.command()(block.get)
app.command("explain")(look.explain_keys)
app.command()(look.ls)
app.command()(look.rm)
app.command()(prefill_worker.prefill_worker)
app.command()(replay.replay)
app.command()(gateway.gateway)
app.command()(simulate.simulate)
app.command("size")(size.size_tiers)
app.command()(verify.verify)
app.command()(doctor.doctor)
app.command("config")(show_settings.show_settings)
app.command()(bench.bench)
