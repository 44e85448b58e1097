# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Wrong command lines, and sizes that no machine has."""

import os
import signal
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from beluga.cli import logs, main
from beluga.cli.app import app, cxl_rpc
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.tiers.disk import DiskTier

HUGE = 10**23
# A command line, the status, and a part of the line that it prints. POOL is a pool without a
# server, FOLDER an empty folder.
TABLE = [
    ("foo", 2, "'foo' is not a command"),
    ("serv", 2, "did you mean serve?"),
    ("pool foo", 2, "'foo' is not a command"),
    ("ping --no-such-option", 2, "--no-such-option is not an option"),
    ("ping --hos 1", 2, "--hos is not an option; did you mean --host?"),
    ("put", 2, "KEY is missing"),
    ("put k", 2, "FILE is missing"),
    ("get k a b", 2, "unexpected extra argument (b); remove it"),
    ("umount a b", 2, "unexpected extra arguments (a b); remove it"),
    ("pool create POOL --size 8M --force=yes", 2, "does not take a value; remove it"),
    ("prefill-worker", 2, "--engine is missing; give it"),
    ("prefill-worker --engine http://a:1 --queue nats:// --name m", 2, "use nats://HOST:PORT"),
    ("prefill-worker --engine http://a:1 --queue nats://a:99999 --name m", 2, "use nats://HOST"),
    ("gateway --worker http://a:1 --ttft-goal 0", 2, "--ttft-goal is 0; give at least 0.001"),
    ("gateway --worker http://a:1 --token-goal -1", 2, "--token-goal is -1; give at least"),
    ("bench bandwidth --coherence foo", 2, "--coherence is 'foo'; give software or hardware"),
    ("bench rpc --smoke --pool POOL --coherence software", 2, "leave --coherence out"),
    ("serve --pool POOL --remote redis://a:1/b", 2, "its database is not a number; give redis://"),
    ("pool create FOLDER/a --size 6M --lanes 4096", 1, "no room for blocks beside the tables of"),
    ("ping --count", 2, "--count has no value; give one"),
    ("--config /nowhere/a.toml ping", 2, "/nowhere/a.toml: No such file or directory"),
    ("--log-level loud ping", 2, "--log-level is 'loud'; give debug, info, warning or error"),
    # Ranges
    ("ping --timeout -1", 2, "--timeout is -1; give at least 0.001"),
    ("ping --timeout nan", 2, "--timeout is nan; give at least 0.001"),
    ("ping --timeout inf", 2, "--timeout"),
    ("ping --host 64", 2, "--host is 64; give 0 to 63"),
    ("ping --host x", 2, "--host is 'x'; give a whole number 0 to 63"),
    ("ping --count 0", 2, "--count is 0; give 1 to 1000000"),
    ("pool create POOL --size 64M --force --lanes 0", 2, "--lanes is 0; give 1 to"),
    ("pool create POOL --size 64M --force --lanes 100000", 2, "--lanes is 100000; give 1 to"),
    ("drain --pool POOL --timeout -1", 2, "--timeout is -1"),
    ("ls --pool POOL --limit -1", 2, "--limit is -1; give at least 1"),
    ("top --pool POOL --interval 0", 2, "--interval is 0; give 0.1 to 3600"),
    ("top --pool POOL --interval inf", 2, "--interval is inf"),
    ("trace --pool POOL --slow -3", 2, "--slow is -3; give at least 0"),
    ("verify --pool POOL --seconds -1", 2, "--seconds is -1"),
    ("simulate --workers 0", 2, "--workers is 0; give 1 to"),
    ("simulate --hbm 9999999TB", 2, "--hbm"),
    (f"simulate --pool-bytes {'9' * 400}TB", 2, "--pool-bytes"),
    ("replay --clients 0", 2, "--clients is 0; give 1 to 16"),
    ("replay --speed inf", 2, "--speed"),
    ("replay --rate 0", 2, "--rate"),
    ("replay --rate fast", 2, "--rate"),
    ("replay --block-bytes 0", 2, "--block-bytes) of 0 bytes is too small"),
    ("replay --pool-bytes 1M", 2, "give at least 24 MiB"),
    ("replay --pool-bytes 1000T", 2, "--pool-bytes"),
    ("gateway --worker foo", 2, "'foo' is not an engine's URL; give http://HOST:PORT"),
    ("gateway --worker http://a:99999", 2, "is not an engine's URL; give http://HOST:PORT"),
    ("gateway --kv-events http://b:1=tcp://b:2", 2, "http://b:1, which is not a worker"),
    ("gateway --model foo", 2, "'foo' is not MODEL=URL,URL"),
    ("gateway --admin foo", 2, "'foo' is not HOST:PORT"),
    ("gateway --costs foo", 2, "--costs is 'foo'; give qwen3-32b-h200, "),
    ("gateway --gpu-path foo", 2, "--gpu-path is 'foo'; give root-complex or switch"),
    ("gateway --queue foo", 2, "--queue is 'foo'; give fcfs, lcfs or wspt"),
    ("gateway --prefill-when foo", 2, "--prefill-when is 'foo'; give always-remote"),
    ("gateway --prefill-queue foo", 2, "'foo' is not MODEL=QUEUE"),
    ("gateway --prefill-queue m=pool --prefill-threshold foo=x", 2, "'foo=x' is not NAME=NUMBER"),
    ("gateway --policy foo", 2, "--policy: there is no policy 'foo'; choose one of"),
    ("gateway --allow-origin foo", 2, "--allow-origin foo is not an origin"),
    ("gateway --worker http://a:1 --port 70000", 2, "--port is 70000; give 0 to 65535"),
    ("serve --quota-bytes -5", 2, "--quota-bytes: '-5' is not a size"),
    (f"serve --quota-bytes {HUGE}", 2, "--quota-bytes"),
    (f"serve --quota-calls {1 << 32}", 2, "--quota-calls"),
    (f"serve --quota-grants {1 << 32}", 2, "--quota-grants"),
    (f"serve --quota-pins {1 << 32}", 2, "--quota-pins"),
    ("serve --silent nan", 2, "--silent is nan"),
    (f"size --layers {HUGE}", 2, "--layers"),
    ("size --memory foo", 2, "--memory: 'foo' is not a size"),
    ("size --disk-bandwidth inf", 2, "--disk-bandwidth is inf"),
    # Words
    ("pool create POOL --size 64M --force --coherence foo", 2, "give hardware or software"),
    ("serve --pool POOL --eviction foo", 2, "--eviction is 'foo'; give lru"),
    ("serve --pool POOL --offload never", 2, "--offload is 'never'; give"),
    ("serve --pool POOL --admission none", 2, "--admission is 'none'; give"),
    ("replay --format none", 2, "--format is 'none'; give"),
    ("trace --method foo", 2, "foo"),
    ("bench foo", 2, "foo"),
    # Sizes of pools
    ("pool create POOL --size 64X --force", 2, "'64X' is not a size; write 4096"),
    ("pool create POOL --size -1G --force", 2, "'-1G' is not a size"),
    ("pool create POOL --size 3M --force", 2, "is a multiple of 2 MiB, from 4 MiB"),
    ("pool create POOL --size 64 --force", 2, "is a multiple of 2 MiB, from 4 MiB"),
    ("pool create POOL --size 999T --force", 2, "is a multiple of 2 MiB, from 4 MiB"),
    ("pool info --pool POOL@3+5", 2, "is not a multiple of 2 MiB"),
    ("pool create POOL --size 64M --force --bulk-size 1", 2, "give 4096 to 67108864 bytes"),
    ("pool create POOL --size 64M --force --block-bytes 1", 2, "is 1; give at least 64 bytes"),
    # Handlers
    ("serve --pool POOL --handlers os:path", 2, "give a Handlers or a list of functions"),
    ("serve --pool POOL --handlers none:x", 2, "there is neither a module none nor a file"),
    # Devices and files
    ("serve --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("serve --detach --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("serve --pool /etc/passwd", 2, "holds something other than a Beluga pool"),
    ("serve --pool FOLDER", 2, "is a directory; name a file in it"),
    ("ping --pool POOL --pool POOL", 2, "are the same memory; name each device once"),
    ("stop --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("top --pool /dev/null --once", 2, "name a devdax node or a file"),
    ("pool check --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("pool destroy --yes FOLDER/none", 2, "no such device or file; check the path"),
    ("pool destroy --yes BYTES", 2, "holds no Beluga pool; nothing was destroyed"),
    ("mount FOLDER/none", 2, "no such device or file; check the path"),
    ("mount --create /nowhere/x --size 64M", 2, "there is no directory /nowhere; make it first"),
    ("mount --metadata POOL", 2, "--metadata goes with devices for the blocks; name them, too"),
    ("bench rpc --smoke --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("verify --pool FOLDER/none", 2, "no such device or file; check the path"),
    ("pool create /nowhere/x --size 64M", 2, "there is no directory /nowhere; make it first"),
    ("pool create /dev/null --size 64M", 2, "name a devdax node or a file"),
    ("pool create FOLDER --size 64M", 2, "is a directory; name a file in it"),
    ("pool create FOLDER/a FOLDER/a --size 64M", 2, "name each device once"),
    ("pool create FOLDER/a --metadata FOLDER/a --size 64M", 2, "name each device once"),
    (
        "pool create FOLDER/a --size 64M --coherence software --coherence hardware",
        2,
        "2 coherence modes for 1 devices; name one for all or one for each",
    ),
    ("pool create FOLDER/a --size 64M --metadata-coherence software", 2, "name it with --metadata"),
    ("pool create FOLDER/a,node=x --size 64M", 2, "node=x is not the number of a NUMA node"),
    ("pool create FOLDER/a --size 8M --block-bytes 16M", 2, "--block-bytes (block_bytes) is from"),
    ("pool create POOL --size 64M", 1, "holds a pool already"),
    ("put --pool POOL k /nowhere", 2, "/nowhere: No such file or directory; check the path"),
    ("put --pool POOL k /tmp", 2, "/tmp: Is a directory"),
    ("put --pool POOL k /etc/passwd/x", 2, "/etc/passwd/x: Not a directory; check the path"),
    ("get --pool POOL k /nowhere/x", 2, "/nowhere/x: No such file or directory; check the path"),
    (f"get --pool POOL k FOLDER/{'x' * 300}", 2, "File name too long; give a shorter path"),
    ("disk adopt /nowhere", 2, "/nowhere does not exist; name the disk of a server"),
    ("disk adopt /dev/null", 2, "/dev/null is not a folder, file or block device"),
    ("disk adopt FOLDER", 2, "is not a disk tier; name the disk of a server (--disk)"),
    ("serve --pool POOL --disk /nowhere/a/d --disk-bytes 1G", 2, "there is no folder /nowhere/a"),
    ("serve --pool POOL --disk BYTES --disk-bytes 16M", 2, "is not a disk tier; give another path"),
    ("serve --pool POOL --disk a --disk ./a --disk-bytes 32M", 2, "twice; give each disk once"),
    ("serve --pool POOL --remote s3://", 2, "it has no bucket; give s3://BUCKET/PREFIX"),
    ("serve --pool POOL --remote file://a", 2, "is not a folder's URL; write file:///PATH"),
    ("serve --pool POOL --remote file://BYTES", 2, "is not a folder; give"),
    ("replay --disk /nowhere/a/d --disk-bytes 1G", 2, "there is no folder /nowhere/a"),
    ("replay --remote file://BYTES", 2, "is not a folder; give"),
    (
        "serve --pool POOL --events tcp://a:1 --events-replay tcp://a:2 --events-token /nowhere",
        2,
        "the token file /nowhere cannot be read: No such file or directory; name a text file",
    ),
    ("serve --pool POOL --admin 0 --admin-tls BYTES", 2, "is not CERTIFICATE,KEY"),
    ("serve --pool POOL --admin 0 --admin-tls BYTES,LIST", 2, "give PEM files that belong"),
    ("simulate /nowhere", 2, "/nowhere: No such file or directory; name a trace"),
    ("simulate FOLDER", 2, "has no *.json in it; name a directory of weka sessions"),
    ("simulate LIST", 2, "specify it with --format"),
    ("simulate LIST --format openai", 2, ""),
    ("simulate --report /nowhere/x.html", 2, "/nowhere/x.html: No such file or directory"),
    ("simulate --report FOLDER/x.pdf", 2, "is not .html; give such a name"),
    ("replay /nowhere", 2, "/nowhere: No such file or directory; name a trace"),
    ("size /nowhere", 2, "cannot read /nowhere: No such file or directory; name a folder or file"),
    ("size --trace /nowhere", 2, "/nowhere: No such file or directory; name a trace"),
    ("size FOLDER", 2, "No such file or directory; name a folder or file"),
    ("bench report --from /nowhere", 2, "/nowhere: No such file or directory; check the path"),
    ("bench report --from BYTES", 2, "is not JSON"),
    ("bench report --from LIST", 2, "has no results; write them with beluga bench"),
    ("bench report --out /nowhere/x.html", 2, "/nowhere/x.html: No such file or directory"),
    # Addresses
    ("serve --pool POOL --admin foo", 2, "--admin: 'foo' has no port; use [HOST:]PORT"),
    ("serve --pool POOL --admin 99999", 2, "out of range; give 0 to 65535"),
    ("serve --remote ftp://x", 2, "--remote: the remote store's URL has no supported scheme"),
    ("serve --pool POOL --disk-bytes 1", 2, "--disk"),
    ("serve --pool POOL --events foo", 2, "--events and --events-replay need each other"),
    ("serve --events tcp://a:1 --events-replay foo", 2, "'foo' is not an endpoint"),
    ("serve --events tcp://a:1 --events-replay tcp://a:1", 2, "cannot both be at tcp://a:1"),
    # Options that need others
    ("serve --disk /a", 2, "--disk-bytes"),
    ("serve --events-replay tcp://a:1", 2, "need each other; give both"),
    (
        "serve --events-form json",
        2,
        "--events-form is json; give vllm, dynamo, llm-d, mooncake, vllm-v1",
    ),
    *(
        (f"serve --hint-budget={text}", 2, f"--hint-budget is '{text}'; give a part of each share")
        for text in ("101%", "-1", "a", "", "0.25.1", "1e1", "acme=25%", "nan")
    ),
    *(
        (f"{command} {option}", 2, "need a trace; name one")
        for command in ("simulate", "replay")
        for option in ("--format=azure", "--time-unit=s", "--block-tokens=16", "--rate=2")
    ),
    *(
        (f"prefill-worker --engine {engine} --queue pool --name m", 2, "http://HOST:PORT")
        for engine in ("foo", "localhost:8000", "http://", "ftp://a:1")
    ),
    ("get k --pool POOL --json", 2, "--json needs a FILE"),
    ("trace --pool POOL --follow --before", 2, "--follow excludes"),
    ("verify --pool POOL --peer", 2, "--role"),
    ("verify --pool POOL --peer --role c", 2, "--role"),
    ("verify --pool POOL --role a", 2, "--peer"),
    ("prefill-worker --engine http://a:1 --queue x://y --name m", 2, "is not a prefill queue"),
    ("gateway --worker http://a:1 --workers-file /nowhere", 2, "/nowhere does not exist"),
    ("gateway --worker http://a:1 --tokenizer /nowhere", 2, "/nowhere does not exist"),
    ("gateway --worker http://a:1 --tokenizer / --chat-template /nowhere", 2, "does not exist"),
    ("gateway --worker http://a:1 --chat-template /", 2, "--chat-template needs --tokenizer"),
    ("bench everything", 2, "no benchmark 'everything'"),
    ("bench rpc --smoke --pace device=1GB/s", 2, "rpc does not use --pace; remove it (latency,"),
    ("bench indexer --pool POOL", 2, "indexer does not use --pool"),
    ("bench latency --smoke --pace foo", 2, "no pace 'foo'; write it as"),
    ("bench rpc --out page.html", 2, "add report"),
    ("quota --pool POOL --set pins", 2, "give a whole number"),
    ("quota --pool POOL --set pins=-1", 2, "give a whole number"),
    (f"quota --pool POOL --set pins={1 << 32}", 2, "must be from 0 to 4294967295"),
    ("quota --pool POOL --set bytes=many", 2, "many"),
    ("serve --watch", 2, "--watch needs --standby"),
    ("serve --offload wait", 2, "--disk or --remote"),
    ("replay --admission sketch", 2, "--disk or --remote"),
    ("serve --disk FOLDER/d --disk-bytes 1", 2, "give it at least 4 MiB"),
    ("serve --share acme", 2, "--share is 'acme'; give a tenant and its part: acme=30%"),
    ("serve --share a=60% --share b=60%", 2, "share"),
    ("quota --pool POOL --set foo=1", 2, "--set is 'foo=1'; give LIMIT=N"),
    ("serve --admission always", 2, "--disk or --remote"),
    ("replay --offload drop", 2, "--disk or --remote"),
    ("serve --events tcp://a:1 --events-replay tcp://a:70000", 2, "has a port above 65535"),
    ("serve --events ipc:///no/such/a --events-replay ipc:///no/such/b", 2, "is not a folder"),
    ("serve --events ipc:///proc/version --events-replay tcp://a:1", 2, "with other data"),
    (f"serve --events ipc:///tmp/{'x' * 120} --events-replay tcp://a:1", 2, "at most 107 bytes"),
    # Files of wrong content: BYTES is not text, LIST is a JSON list
    ("--config BYTES ping", 2, "line 1: the text is not UTF-8; convert it"),
    ("--config LIST ping", 2, "[1] is not a command; remove it, or see 'beluga --help'"),
    ("--config FOLDER ping", 2, "Is a directory; name a file of settings"),
    ("serve --pool POOL --admin 0 --admin-token BYTES", 2, "it is not text; name a text file"),
    ("serve --pool POOL --admin 0 --admin-token FOLDER", 2, "Is a directory; name a text file"),
    ("gateway --workers-file BYTES", 2, "it is not text; name a file with a worker's URL"),
    ("gateway --workers-file FOLDER", 2, "Is a directory; name a file with a worker's URL"),
    ("get k FOLDER --pool POOL", 2, "Is a directory; name a file"),
    ("put --pool POOL k FOLDER", 2, "Is a directory; name a file"),
    ("size LIST", 2, "is not a model's configuration; name its config.json"),
    ("size BYTES", 2, "is not JSON; name a model's config.json"),
    ("simulate BYTES", 2, "is not text; name a trace"),
    ("gateway --worker http://127.0.0.1:9 --admin 0.0.0.0:0", 2, "give --admin-token FILE, or"),
    ("gateway --worker http://a:1 --tokenizer LIST", 2, "tokenizer"),
    ("gateway --worker http://a:1 --admin-token /nowhere", 2, "the token file /nowhere cannot be"),
    ("gateway --worker http://a:1 --tls BYTES,BYTES", 2, "give PEM files that belong together"),
    ("gateway --worker http://a:1 --pool-events foo", 2, "'foo' is not ENDPOINT,REPLAY"),
    ("gateway --worker http://a:1 --kv-events http://a:1=foo", 2, "foo"),
    ("gateway --worker http://a:1 --model m=foo", 2, "'foo' is not an engine's URL"),
    ("prefill-worker --engine http://a:1 --queue /nowhere --name m", 2, "is not a prefill queue"),
    ("serve --pool POOL --remote redis://", 2, "give redis://HOST:PORT/DATABASE"),
    # A simulation, before its trace is read
    *(
        (f"simulate /nowhere --{option}", 2, text)
        for option, text in [
            ("memory none", "--memory is 'none'; give pool, split or both"),
            ("scale-at 1:2", "write 600:+2 or 600:-1"),
            ("scale-at 1:+0", "write 600"),
            ("scale-at 1:+99999999999", "workers is at most 65536"),
            ("preset none", "--preset is 'none'; give feasibility"),
            ("speed 1,0", "--speed is 0.0, but must be greater than 0"),
            ("speed 1e-300", "--speed is from 1e-06 to 1e+06, not 1e-300"),
            ("speed inf", "--speed is inf, but must be greater than 0"),
            ("policy none", "there is no policy 'none'; choose one of"),
            ("policy linear:decay=-1", "decay of policy linear is -1; give 0 or more; its sett"),
            ("policy random:decay=1", "policy random has no setting 'decay'; it has no settings"),
            ("model none", "--model is 'none'; give qwen3-32b-h200"),
            ("pool-bytes 0", "--pool-bytes is 0, but must be at least 1"),
            ("local-bandwidth 0", "--local-bandwidth is 0.0, but must be greater than 0"),
            ("bandwidth inf", "--bandwidth is inf; give a finite number"),
            ("gpu-path none", "--gpu-path is 'none'; give root-complex or switch"),
            ("report r.pdf", "--report 'r.pdf' is not .html; give such a name"),
            ("report /proc/report.html", "/proc/report.html"),
            ("engine none", "--engine is 'none'; give chunked or serial"),
            ("eviction none", "--eviction is 'none'; give lru, s3fifo or fifo"),
            ("format none", "--format is 'none'; give mooncake"),
            *((f"rate {rate}", "--rate") for rate in ("inf", "0", "-1")),
            *((f"{name} 0", f"--{name}") for name in ("ttft-goal", "planner", "seeds")),
            *((f"{name} 0", f"--{name}") for name in ("adapters", "devices")),
            ("workers 100000000", "--workers"),
            ("seeds 99999999999999", "--seeds"),
            (f"adapters {HUGE}", "--adapters"),
        ]
    ),
    ("simulate LIST --format azure", 2, "no columns TIMESTAMP"),
    # Sizes of models
    ("size --kv-heads 8 --memory 4G", 2, "need --layers"),
    ("size x --layers 2", 2, "give a model or its numbers"),
    ("size --layers 4 --memory 4G", 2, "needs layers, and KV heads"),
    *(
        (f"size --layers 64 --kv-heads 8 --head-dim 128 {options}", 2, text)
        for options, text in [
            ("--memory 1x", "1x"),
            ("--recompute-ms 1 --model-costs qwen3-32b-h200", "exclude each other"),
            ("--memory 4G --model-costs x", "--model-costs is 'x'; give qwen3-32b-h200"),
            ("--memory 4G --disk-bandwidth inf", "--disk-bandwidth"),
            ("--memory 4G --recompute-ms inf", "--recompute-ms"),
            (f"--memory 4G --position {HUGE}", "--position"),
            ("--dtype F8 --memory 4G", "--dtype is 'F8'; give F32, F16"),
        ]
    ),
    # Disks and stores are checked before a takeover.
    ("serve --pool POOL --disk /dev/null --disk-bytes 16M", 2, "is not a folder, file or block"),
    ("serve --pool POOL --disk= --disk-bytes 16M", 2, "the path of a disk tier is empty"),
    ("serve --pool POOL --disk POOL --disk-bytes 16M", 2, "but is not a disk tier; give"),
    ("serve --pool POOL --remote file:a", 2, "write file:///PATH"),
    ("serve --pool POOL --remote file://BYTES/a/b", 2, "is not a folder; give"),
    # More words
    ("pool create FOLDER/a --size 99999T", 2, "--size; device_size"),
    ("bench report --out page.txt", 2, "does not end with .html"),
    ("bench report nothing", 2, "no benchmark 'nothing'"),
    # Empty texts, and names that are given twice
    ("put --pool POOL k /dev/null", 2, "is empty; give at least one byte"),
    ("put --pool POOL EMPTY LIST", 2, "KEY: it is empty; give a text"),
    ("rm --pool POOL EMPTY", 2, "KEY...: it is empty; give a text"),
    ("put --pool POOL k LIST --namespace EMPTY", 2, "--namespace: it is empty; give a text"),
    ("rm --pool POOL k --field =a", 2, "--field =a is not NAME=VALUE"),
    ("rm --pool POOL k --field a=1 --field a=2", 2, "--field names a twice; give each field once"),
    ("gateway --worker http://a:1 --allow-host EMPTY", 2, "--allow-host is empty; give a name"),
    ("prefill-worker --engine http://a:1 --queue pool --name EMPTY", 2, "--name is empty; give"),
    ("serve --pool POOL --remote memory://a --remote memory://a", 2, "twice; give each store once"),
    # Options without the one that they need, and both of two
    *(
        (f"serve --pool POOL {option}", 2, f"{option.split()[0]} needs {needed}; give both")
        for option, needed in (
            ("--events-form llm-d", "--events"),
            ("--events-name a", "--events"),
            ("--events-model a", "--events"),
            ("--events-token LIST", "--events"),
            ("--admin-token LIST", "--admin"),
            ("--admin-tls LIST,LIST", "--admin"),
            ("--handler-threads 2", "--handlers"),
            ("--disk-owner a", "--disk"),
            ("--watch", "--standby"),
        )
    ),
    *(
        (f"gateway {option}", 2, f"{option.split()[0]} needs --prefill-queue; give both")
        for option in ("--prefill-when length", "--prefill-threshold a=1", "--prefill-wait 2")
    ),
    ("gateway --pool-events-token LIST", 2, "--pool-events-token needs --pool-events; give both"),
    ("mount POOL --size 64M", 2, "--size needs --create; give both"),
    ("mount POOL --no-interleave", 2, "--no-interleave needs --create; give both"),
    ("size --position 5", 2, "--position needs --model-costs; give both"),
    ("size --disk-bandwidth 5", 2, "--disk-bandwidth needs --disk; give both"),
    ("size --layers 2 --latent-dim 5 --kv-heads 1", 2, "--latent-dim excludes --kv-heads and"),
    ("pool create FOLDER/a --size 64M --max-blocks 9 --block-bytes 1M", 2, "give one of them"),
    # Addresses that nobody has, and sizes that contradict each other
    ("gateway --port 0 --admin 127.0.0.1:0 --host a.invalid", 2, "give another --host or --port"),
    ("serve --pool POOL --admin 192.0.2.1:9", 2, "name another with --admin"),
    ("gateway --kv-events http://a:1=foo --worker http://a:1", 2, "use tcp://HOST:PORT or ipc:///"),
    ("gateway --worker http://a:1 --kv-events http://a:1=tcp://a:70000", 2, "port above 65535"),
    ("gateway --worker http://a:1 --max-bodies 1M", 2, "give at least --max-body, 67108864"),
    ("gateway --worker http://a:1 --max-bodies 0", 2, "--max-bodies is 0; give at least 1"),
    ("gateway --worker http://a:1 --prefill-queue m=pool:/nowhere", 2, "check the path"),
    ("bench tiers-disk --disk /nowhere", 2, "--disk /nowhere is not a folder; name one"),
    ("serve --pool POOL --forget-tier foo", 2, "--forget-tier: the remote store's URL has no"),
    ("disk adopt LIST", 2, "has data, but is not a disk tier; give another path"),
    ("pool check --pool LIST", 2, "name a pool, or make one: beluga pool create PATH..."),
    # No server
    ("ping --pool POOL --timeout 1", 1, "no server answers on this pool; start one with"),
    ("stat --pool POOL", 1, "start one with 'beluga serve'"),
    ("get k --pool POOL", 1, "no server answers on this pool"),
    ("trace --pool POOL", 1, "trace does not exist"),
    ("top --pool POOL --once", 1, "start 'beluga serve'"),
    ("quota --pool POOL --set pins=1", 1, "no server of this pool runs on this host"),
    ("drain --pool POOL", 1, "no server of this pool runs on this host"),
    ("stop --pool POOL", 1, "no server was started here with --detach"),
]


@pytest.mark.parametrize(("line", "status", "text"), TABLE, ids=[row[0][:60] for row in TABLE])
def test_a_wrong_line_is_one_line_with_its_mend(
    line: str,
    status: int,
    text: str,
    *,
    shm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = shm / "pool"
    if "POOL" in line:
        Pool.create([str(pool)], device_size=24 << 20, sparse=True).close()
    monkeypatch.setenv("BELUGA_CONFIG", os.devnull)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    (tmp_path / "list").write_text("[1]")
    names = {
        "POOL": pool,
        "FOLDER": tmp_path,
        "BYTES": tmp_path / "bytes",
        "LIST": tmp_path / "list",
    }
    words = line.split()
    for name, path in names.items():
        words = [word.replace(name, str(path)) for word in words]
    words = ["" if word == "EMPTY" else word for word in words]
    monkeypatch.setattr("sys.argv", ["beluga", *words])
    try:
        with pytest.raises(SystemExit) as ended:
            main.main()
    finally:
        logs.end()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (status, "")
    assert shown.err.startswith("beluga")
    assert ": error: " in shown.err
    assert (shown.err.count("\n"), text in shown.err) == (1, True), shown.err
    assert not (tmp_path / "a").exists()


# Options of sizes that have no limit of their own: of quotas and buffers, and of what is computed.
UNLIMITED = {
    *("serve --quota-bytes", "gateway --max-body", "gateway --max-bodies", "size --disk"),
    *("simulate --pool-bytes", "simulate --local", "simulate --hbm"),
}
# The other options of sizes, with a size that parses and that no machine has.
NEEDED = "--disk {folder}/new"
MADE = "pool create {folder}/a"
ABSURD = {
    "serve --disk-bytes": f"serve {NEEDED}",
    "replay --disk-bytes": f"replay {NEEDED}",
    "replay --pool-bytes": "replay",
    "replay --block-bytes": "replay",
    "size --memory": "size",
    "pool create --size": MADE,
    "pool create --block-bytes": f"{MADE} --size 8M",
    "pool create --bulk-size": f"{MADE} --size 8M",
    "mount --size": "mount --create {folder}/a",
    "mount --block-bytes": "mount --create {folder}/a --size 8M",
    "mount --bulk-size": "mount --create {folder}/a --size 8M",
}


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_of(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_the_options_of_sizes_are_known() -> None:
    sizes = {
        f"{' '.join(words)} {option.opts[0]}"
        for program in (app, cxl_rpc)
        for words in program.leaves()
        for option in program.at(words).params
        if _value(option, "2M") == 2 << 20 or _value(option, "2M") == [2 << 20]
    }
    assert sizes == ABSURD.keys() | UNLIMITED


def _value(option: Any, text: str) -> object:
    try:
        return option.type.convert(text, option, None)
    except (click.BadParameter, ValueError):
        return None


@pytest.mark.parametrize("value", ["1", "900T", "8388607T"])
@pytest.mark.parametrize("option", ABSURD)
def test_an_absurd_size_is_one_error_and_nothing_else(
    tmp_path: Path, option: str, value: str
) -> None:
    (tmp_path / "pool").mkdir()
    Pool.create(tmp_path / "pool/a", device_size=24 << 20, sparse=True).close()
    DiskTier(tmp_path / "new", 8 << 20).close()  # a tier that exists has its own checks
    words = ABSURD[option].format(folder=tmp_path).split()
    if words[0] == "serve":
        words += ["--pool", str(tmp_path / "pool/a")]
    refused = beluga(*words, option.rsplit(maxsplit=1)[-1], value)
    if refused.exit_code == 2:
        assert option.rsplit(maxsplit=1)[-1] in output_of(refused)
        return
    assert isinstance(refused.exception, BelugaError), refused.output
    assert refused.output == ""
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain k --field a=b --namespace foo", "--field and --namespace foo exclude each other"),
        *(
            (f"trace --session {session}", "give pid:N, host:N, lane:N or 16 hex digits")
            for session in ("foo", "pid:x", "lane:")
        ),
    ],
)
def test_a_wrong_line_about_a_served_pool_is_rejected(
    pool: list[str], server: object, line: str, message: str
) -> None:
    refused = beluga(*line.split(), *pool)
    assert refused.exit_code == 2
    assert message in output_of(refused)
