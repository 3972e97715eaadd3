"""Members that end badly, and members that get everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rocketmq_spark import Admin, Consumer
from rocketmq_spark.localbroker import LocalBroker
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed

ROOT = Path(__file__).parents[3]
# A member as users write one; it says what it gets.
MEMBER = """
import sys
from rocketmq_spark import Consumer

with Consumer(name_server=sys.argv[1], group=sys.argv[2], consume_from_where="earliest") as consumer:
    consumer.subscribe(sys.argv[3])

    def listener(messages, context):
        sys.stdout.write("".join(f"{m.body.decode()}\\n" for m in messages))
        sys.stdout.flush()

    consumer.run(listener)
print("over", flush=True)
"""


def member(members: Members) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MEMBER, members.mq.name_server, members.group, members.topic]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_uncommitted_messages_of_killed_member_come_again(members: Members) -> None:
    sent = feed(members.mq, members.topic, 80)
    first = member(members)
    assert first.stdout is not None
    theirs = [first.stdout.readline().strip() for _ in range(80)]
    first.kill()
    assert first.wait(60) == -signal.SIGKILL, "it had ended before"
    first.stdout.close()
    assert Counter(theirs) == Counter(sent)
    # None, unless the machine was slow: offsets are stored after 10 s. Each queue has ten messages, in this order.
    done = {queue.queue_id: offset or 0 for queue, offset in members.stored().items()}
    again = [body for at, body in enumerate(sent) if at % 10 >= done[at // 10]]
    ours = members.start()
    new = feed(members.mq, members.topic, 80)
    eventually(lambda: members.owned(ours) == 8 and {*again, *new} <= set(members.bodies()), 60)
    assert Counter(members.bodies()) == Counter([*again, *new])


def test_run_ends_with_sigterm_and_leaves_the_group(members: Members) -> None:
    """One message for each queue: of two, a pull may bring the offset of the first, which a broker may store after the stop's."""
    sent = feed(members.mq, members.topic, 8)
    process = member(members)
    assert process.stdout is not None
    got = [process.stdout.readline().strip() for _ in range(8)]
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read().split()
    process.stdout.close()
    assert process.wait(60) == 0
    assert (Counter(got), rest) == (Counter(sent), ["over"])
    assert sum(offset or 0 for offset in members.stored().values()) == 8


def test_broadcasting_members_get_all_and_resume_after_restart(members: Members, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    both = [members.start(clustering=False, offsets_folder=folder) for folder in folders]
    sent = feed(members.mq, members.topic, 40)
    eventually(lambda: len(members.bodies()) == 80, 60)
    assert Counter(members.bodies()) == dict.fromkeys(sent, 2)
    assert both[0].stop() == []
    more = feed(members.mq, members.topic, 8)
    eventually(lambda: len(members.bodies()) == 88, 60)
    again = members.start(clustering=False, offsets_folder=folders[0])
    eventually(lambda: len(members.bodies()) == 96, 60)
    assert sorted(m.body.decode() for who, m in members.got if who == again.client_id) == sorted(more)


def test_broadcasting_members_of_two_clusters_share_no_offsets(
    rocketmq: LocalBroker, lone: LocalBroker, topic: str, tmp_path: Path
) -> None:
    """Brokers, topic and group have the same names in both. Neither member is running while its messages are sent."""
    group, clusters = f"g-{topic}", (rocketmq, lone)
    Admin(lone.name_server).create_topic(topic, 4)
    sent, got = list[str](), list[str]()

    def member(mq: LocalBroker) -> Consumer:
        how = {"model": "broadcasting", "local_offsets_dir": str(tmp_path), "consume_from_where": "earliest"}
        consumer = Consumer(name_server=mq.name_server, group=group, **how)
        consumer.subscribe(topic)
        consumer.start(lambda messages, context: got.extend(message.body.decode() for message in messages))
        return consumer

    for mq, count in zip(clusters * 2, (40, 8, 80, 16), strict=True):
        sent.extend(feed(mq, topic, count))
        with member(mq):
            eventually(lambda: len(got) >= len(sent), 60)
        assert Counter(got) == Counter(sent)
    assert len(list(tmp_path.rglob("offsets.json"))) == 2


def test_broadcasting_member_resumes_at_offsets_of_old_release(members: Members, tmp_path: Path) -> None:
    how: dict[str, Any] = {"clustering": False, "offsets_folder": tmp_path, "name_servers": (members.mq.name_server,)}
    sent = feed(members.mq, members.topic, 8)
    first = members.start(**how)
    eventually(lambda: len(members.bodies()) == len(sent), 60)
    first.stop()
    (file,) = tmp_path.rglob("offsets.json")
    file.rename(file.parents[1] / file.name)
    file.with_name("offsets.json.bak").unlink(missing_ok=True)
    more = feed(members.mq, members.topic, 8)
    again = members.start(**how)
    eventually(lambda: len(members.bodies()) == 16, 60)
    assert sorted(m.body.decode() for who, m in members.got if who == again.client_id) == sorted(more)
    assert list(tmp_path.rglob("offsets.json")) == [file]
