# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What to do about single messages of errors whose class is too wide to say it.

The docstring of a class in beluga/errors.py says what to do about its messages. Many messages say
it themselves, after a semicolon. This table is for the others of wide classes: for each class, what
to do, and the messages for which it is so (``*`` stands for any text, ``…`` for what differs).
scripts/gen_reference.py writes docs/errors.md with it, and a test fails when a message of a wide
class has no line, or when a line has no message any more.
"""

from __future__ import annotations

ADVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "RpcError": {
        "Wait until the process has ended, or end it; its log says what it does.": (
            "process … does not end*",
        ),
        "Call request_stop() from the handler; it returns at once.": (
            "a server cannot be stopped*",
        ),
    },
    "NoServerError": {
        "Run 'beluga stat' to see who serves and whether the pool is drained, and try again.": (
            "another command has undone this*",
            "draining has failed: …",
        ),
        "Run the command on a host that uses the pool, with the same BELUGA_RUNTIME_DIR.": (
            "no process of this host has used the pool yet",
        ),
    },
    "DeviceSpecError": {
        "Write the size, the slice or the node as the message shows it.": (
            "a device needs a path*",
            "a device's size (--size; device_size) is a multiple*",
            "…: a slice *",
            "…: node=… is not*",
            "…: … … is not a multiple*",
        ),
        "Give each machine its own number with --host N, on every command.": ("several machines*",),
    },
    "DeviceMissingError": {
        "Name a device-dax node (/dev/daxN.M) or a file; 'daxctl list' shows the nodes.": (
            "… is a character device, but not a device-dax node",
        ),
        "Look whether sysfs is mounted and readable: in containers, mount /sys.": (
            "…: … does not say its number",
        ),
    },
    "VerifyError": {
        "Wait until the other run of this side has ended, or end it.": ("side … of a test*",),
        "Do not share this memory between hosts: it does not keep what the pool relies on.": (
            "this does not hold although*",
        ),
    },
    "LeaseError": {
        "Give the server's service account the rights on leases that docs/deploy.md shows.": (
            "Kubernetes refuses*",
        ),
        "Run the server in a pod with a service account, or use an etcd:// lease.": (
            "no Kubernetes here*",
            "the service account has no*",
        ),
        "Look whether etcd is well and has room (etcdctl endpoint status).": (
            "etcd granted no lease",
        ),
        "Check that the address is right and can be reached from this host.": (
            "… does not answer*",
        ),
        "Write the lease as the message shows it.": ("…: a lease is*",),
        "Look whether the files are there, may be read, and are PEM.": ("no TLS to etcd*",),
    },
    "CacheError": {
        "Run one version of Beluga in clients and servers; else this is a bug to report.": (
            "a block was refused without a reason",
        ),
    },
    "LayoutError": {
        "Make the array writable, or pass a copy of your own; a view of bytes is read-only.": (
            "*read-only",
            "*read-only: it can only*",
            "a sparse plan can only be read",
        ),
        "Give an array or tensor of numbers in memory that the CPU or a known GPU can address.": (
            "a tensor must be contiguous*",
            "a … is no array*",
            "a … of Python's objects*",
            "a … of shape … has no memory",
            "an array of Python's objects*",
            "an object of LMCache is not*",
        ),
        "Compare the engine's version with those that docs/vllm.md, docs/sglang.md and "
        "docs/lmcache.md name; this one arranges its KV cache in another way.": (
            "SGLang does not say*",
            "beluga knows no layout*",
            "shape … has no axis of K and V*",
            "shape … has not … tokens*",
            "shape … is not …, which has*",
            "shape … needs 4 axes*",
            "shape … needs 5 axes*",
            "shape … needs one axis of K*",
            "… buffers of … sizes*",
        ),
        "Give the view the shape and strides that the message names; numpy's reshape and "
        "ascontiguousarray make them.": (
            "a layout needs*",
            "an array of blocks needs*",
            "axes … with*",
            "axis … of*",
            "layers are an axis*",
            "shape … needs a slice*",
            "shape … needs an index*",
            "shape … needs as many*",
            "shape … needs bytes*",
            "shape … with strides*",
        ),
        "Give as many keys, blocks, tokens and addresses as the message asks for, in its type.": (
            "addresses of shape*",
            "block … has no bytes",
            "blocks are a list*",
            "checksums need shape*",
            "need a … buffer*",
            "rows need four arrays*",
            "the blocks of this array*",
            "… are a list of*",
            "… are whole numbers*",
            "… blocks need as many*",
            "… blocks of … bytes do not fit*",
            "… blocks, … tokens*",
        ),
        "Give numbers that are inside the array or the pool.": (
            "blocks … to … of …",
            "offsets … to … are in no pool",
            "rows of blocks …*",
            "tokens of blocks …*",
        ),
        "Make the plan with beluga.transfer.plan instead of by hand: it keeps these rules.": (
            "a block's fragments have*",
            "a fragment lies at address 0*",
            "a plan has a*",
            "a plan needs*",
            "a plan without pieces*",
            "a plan's pieces and chunks*",
            "a run has blocks*",
            "a run's fragments*",
            "offsets and the chunk size*",
            "the plan's pieces are not*",
            "…: its pieces leave*",
            "…: the plan's pieces*",
        ),
        "Remove ~/.cache/beluga, so that the engines are measured again.": (
            "the planner's table has none*",
        ),
    },
    "TransferError": {
        "Make a new engine or handle: this one has ended.": (
            "the CUDA engine is closed",
            "the DSA engine is closed",
            "the I/O handle is closed",
            "the engine was closed*",
        ),
        "Give the link a speed, shares and devices in the range that the message names.": (
            "a link leads to*",
            "settings that no link*",
            "shares are whole numbers*",
            "… was not measured*",
        ),
        "Call the engine in the order that the message names.": (
            "run the same copy once*",
            "… is no CUDA stream*",
        ),
    },
    "EngineUnavailableError": {
        "Set the variable to a value that the message names, or remove it.": (
            "BELUGA_TUNING=…*",
            "…=… is not …",
            "no DSA queue is called*",
        ),
        "Install a C++ compiler (g++), or use the engine cpu.": (
            "there is no C++ compiler*",
            "the kernels can not be compiled*",
            "… can not build the kernels*",
        ),
        "Install Beluga again: a part of it is missing.": ("the kernels' source is not*",),
        "Look at 'beluga doctor' (GPU and driver), or use the engine cpu.": (
            "there is no usable GPU*",
        ),
    },
    "TierError": {
        "Name the store as docs/tiers.md shows it.": (
            "Mooncake Store is named*",
            "a disk tier needs a place*",
            "mooncake:// has no option*",
            "the option buffer of*",
            "the remote store is named*",
            "the remote store's URL*",
        ),
        "Check the store's address, rights and health from this host, with its own client.": (
            "…://… is refused by*",
            "…://…… cannot be opened*",
        ),
        "Check the path, its rights and the disk (dmesg); the pool works without the tier.": (
            "… cannot be made: …",
            "… cannot be opened: …",
        ),
        "Give a number in the range that the message names.": (
            "a bandwidth is greater*",
            "a break-even share*",
            "a policy remembers*",
            "a prefill takes*",
            "computing a token takes*",
        ),
        "Use another model's config.json, or give the numbers by options.": (
            "… has … = …, which*",
            "… is not JSON",
            "… is not a model's*",
        ),
        "Give keys, records and payloads the shape and type that the message names.": (
            "a block has … bytes, a row …",
            "a block of … bytes is longer*",
            "a lower tier needs keys*",
            "beluga finds no memory*",
            "keys are *",
            "records are an array*",
            "the payload of … blocks*",
            "there are … records*",
        ),
        "Give numbers that are inside the storage, and blocks that fit it.": (
            "blocks in a pool begin*",
            "byte … is not*",
            "bytes … to … are not*",
            "no block of … bytes fits*",
            "tier … has … blocks*",
        ),
        "Use a storage of the other kind: one in a pool has offsets, others have addresses.": (
            "the CPU does not touch*",
            "these blocks are *",
            "this storage is not*",
        ),
        "Make a new block manager, storage or tier: this one has ended.": (
            "request … was released",
            "the block manager *",
            "the storage is closed",
            "tier … was closed",
            "… is closed",
        ),
        "Call in the order of a block's states: reserve, fill, commit, register, release.": (
            "a block is registered twice*",
            "a block manager needs*",
            "a block of another tier*",
            "block … has … of*",
            "block … is … and cannot …",
            "block … needs a key*",
        ),
        "Try again or compute the blocks; if it stays, look at the tier in 'beluga stat'.": (
            "a copy of … blocks*",
            "an onboard *",
            "tier … had no*",
            "… of … holds no block*",
        ),
    },
    "ConnectorError": {
        "Write the setting in kv_connector_extra_config as the message says.": (
            "a load from a pool may fail*",
            "beluga's setting* …*",
            "beluga's setting*must*",
            "load_threads must*",
            "onboard_ms must*",
            "timeout_ms and*",
        ),
        "Compare the engine's version with those in docs/vllm.md and docs/sglang.md: this one "
        "arranges its KV cache in another way.": (
            "beluga knows no host pages*",
            "beluga stores KV pages only*",
            "block … of … blocks",
            "the engine has registered*",
            "…: a KV cache of*",
            "…: blocks overlap*",
            "…: parts of a page*",
        ),
        "Configure the connector as docs/vllm.md and docs/lmcache.md show it.": (
            "beluga's storage plugin*",
            "this spec serves*",
        ),
    },
    "RouterError": {
        "Write the option or the line of the workers file as the message shows it.": (
            "'…' is *",
            "'…': an engine's URL*",
            "--chat-template needs*",
            "KV events are named*",
            "no worker is named*",
            "the workers file …*",
            "…, line …: …*",
        ),
        "Give a number in the range that the message names.": (
            "a block has at least*",
            "a prompt's tokens*",
            "a publisher keeps*",
            "an index has 1*",
            "blocks count for*",
            "setting … of rule*",
            "… has to be*",
            "… is from 0*",
        ),
        "Check that the address is free or answers, and that the file is there.": (
            "another router's events*",
            "no KV events can*",
            "no events can*",
            "no pool events can*",
            "no tokenizer can*",
        ),
        "Ask the engine's metrics by hand (curl URL/metrics) and compare its version with those "
        "in docs/routing.md; until then the router counts by itself.": (
            "it answers*",
            "it has no figures*",
            "it is longer*",
            "it tells of no*",
            "this has no*",
            "this is not*",
        ),
        "Use a policy that looks at caches, such as linear, or leave the option out.": (
            "policy … looks at no caches",
        ),
        "Name each worker once.": ("… is a worker already",),
    },
    "EventError": {
        "Run versions of engine and router that fit: docs/routing.md names them. The event is "
        "dropped, and the rest goes on.": (
            "a KV event *",
            "a pool's *",
            "an event is not*",
            "there is no KV event*",
            "… is not a KV event",
        ),
        "Start the router with all workers and ranks that it is to follow.": (
            "worker … is one too many*",
        ),
        "Nothing is to be done once: events were lost, and the index asks for them again.": (
            "…: block not found*",
        ),
    },
    "QueueError": {
        "Read what NATS says, and give this user the rights on the stream.": (
            "NATS at … refused: …",
        ),
        "Ask 'beluga ping': the queue in the pool needs the pool's server.": (
            "the prefill queue in the pool*",
        ),
    },
    "AdminError": {
        "Look at the server's log; its admin endpoint may be busy. Try again.": (
            "the server did not answer*",
        ),
        "Run the command with the Beluga that serves.": (
            "the server is of another*",
            "the server's answer to*",
        ),
    },
    "SimulateError": {
        "Give the option a value in the range that the message names.": (
            "speed is from*",
            "… is at most*",
            "scaling by*",
            "… has to be*",
            "… is one of*",
            "…: a report is*",
        ),
        "Give more memory for each worker, or fewer blocks: see the options for HBM and DRAM.": (
            "HBM of*",
            "no memory to keep*",
        ),
    },
    "TraceError": {
        "Give --rate a number above 0.": ("--rate has to be*",),
        "Cut the trace into parts, or name one that has requests.": (
            "… has more than*",
            "… holds no requests",
        ),
        "Mend or remove that line, or name the right --format.": (
            "…: a hash id*",
            "…:1: no columns*",
            "…:…: *",
        ),
    },
}
