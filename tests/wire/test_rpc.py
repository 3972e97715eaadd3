"""The table of requests: every row there and back, and against what a live broker was asked and answered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import Flag, Request, Response, SerializeType
from rocketmq_spark.errors import LocalProtocolError, RemoteProtocolError
from rocketmq_spark.wire import header, rpc
from rocketmq_spark.wire.header import Command
from tests import strategies
from tests.harness import unhex, vectors

ROWS = list(rpc.row_by_code.values())
LIVE = [case for case in vectors("live_exchanges") if case["request"]]
JAVA = [case for case in vectors("remoting_frames") if case["code"] in rpc.row_by_code and case["frame_json"]]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)

# Rows that neither a captured exchange nor a frame of the Java classes shows: only the round trip vouches for them.
WITHOUT_GOLDEN = {
    "AUTH_CREATE_USER", "AUTH_DELETE_ACL", "AUTH_DELETE_USER", "AUTH_GET_USER", "AUTH_LIST_ACL", "AUTH_LIST_USER",
    "AUTH_UPDATE_ACL",
    "AUTH_UPDATE_USER", "CHECK_CLIENT_CONFIG", "CHECK_TRANSACTION_STATE", "CONSUMER_SEND_MSG_BACK",
    "CONSUME_MESSAGE_DIRECTLY", "DELETE_SUBSCRIPTIONGROUP", "DELETE_TOPIC_IN_BROKER", "DELETE_TOPIC_IN_NAMESRV",
    "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", "GET_ALL_TOPIC_CONFIG", "GET_ALL_TOPIC_LIST_FROM_NAMESERVER",
    "GET_BROKER_CONFIG", "GET_BROKER_RUNTIME_INFO", "GET_CONSUMER_CONNECTION_LIST", "GET_CONSUMER_RUNNING_INFO",
    "GET_CONSUMER_STATUS_FROM_CLIENT", "PUSH_REPLY_MESSAGE_TO_CLIENT", "QUERY_ASSIGNMENT", "QUERY_MESSAGE",
    "QUERY_TOPIC_CONSUME_BY_WHO",
    "RECALL_MESSAGE", "REGISTER_TOPIC_IN_NAMESRV", "RESET_CONSUMER_CLIENT_OFFSET", "SEND_REPLY_MESSAGE_V2", "UNLOCK_BATCH_MQ",
    "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", "UPDATE_BROKER_CONFIG", "VIEW_MESSAGE_BY_ID",
}  # fmt: skip


def live_codes():
    commands = [
        header.decode(unhex(case[side])[4:])
        for case in vectors("live_exchanges")
        for side in ("request", "response")
        if case[side]
    ]
    return {command.code for command in commands if not command.is_response} | {case["code"] for case in JAVA}


def test_every_request_number_has_one_row():
    assert set(rpc.row_by_code) == set(Request)
    assert [getattr(rpc, code.name) for code in Request] == [rpc.row_by_code[code] for code in Request]


def test_which_rows_have_a_golden_frame():
    assert {row.name for row in ROWS if row.code not in live_codes()} == WITHOUT_GOLDEN


@every_row
@given(st.data())
def test_requests_there_and_back(row, data):
    values = data.draw(strategies.arguments(row))
    body = data.draw(st.binary(max_size=9))
    for kind in SerializeType:
        command = header.decode(header.encode(row.request(body, **values), kind)[4:])
        assert command.code == row.code
        assert command.body == body
        assert row.arguments(command) == dict.fromkeys(row.fields) | values


@every_row
@given(st.data())
def test_answers_there_and_back(row, data):
    values = data.draw(strategies.arguments(row, answer=True))
    request = Command(row.code, opaque=data.draw(strategies.int32))
    answer = header.decode(header.encode(row.reply(request, b"x", **values))[4:])
    assert answer.opaque == request.opaque
    assert answer.is_response
    assert row.answer(answer) == dict.fromkeys(row.answer_fields) | values


@every_row
def test_required_fields_are_asked_for(row):
    needed = [name for name, field in row.fields.items() if field.is_required]
    values = {name: {"int": 1, "bool": True, "str": "x"}[row.fields[name].kind] for name in needed}
    row.request(**values)
    for name in needed:
        with pytest.raises(LocalProtocolError, match=name):
            row.request(**{**values, name: None})


@pytest.mark.parametrize("case", LIVE, ids=lambda case: case["label"])
def test_live_requests(case):
    request = header.decode(unhex(case["request"])[4:])
    answer = header.decode(unhex(case["response"])[4:])
    row = rpc.row_by_code.get(request.code)
    if row is None:
        assert answer.code == Response.REQUEST_CODE_NOT_SUPPORTED
        return
    arguments = row.arguments(request)
    # The captured client wrote empty fields; a row leaves them out, which means the same.
    assert row.request(**arguments).ext == {name: value for name, value in request.ext.items() if value}
    values = row.answer(answer)
    assert all(name in row.answer_fields for name in answer.ext)
    assert {
        row.answer_fields[n].wire_name: row.answer_fields[n].text(v) for n, v in values.items() if v is not None
    } == answer.ext


@pytest.mark.parametrize("case", JAVA, ids=lambda case: f"{case['label']} {case['opaque']}")
def test_requests_of_the_java_client(case):
    command = header.decode(unhex(case["frame_json"])[4:])
    if command.is_response:
        return
    row = rpc.row_by_code[case["code"]]
    values = row.arguments(command)
    common = {name: value for name, value in command.ext.items() if name in ("ns", "bname")}
    flags = {name: value == "true" for name, value in command.ext.items() if name in ("nsd", "oway", "lo")}
    assert row.request(**values, **common, **flags).ext == command.ext


def test_pull_answer_of_the_java_classes():
    case = next(case for case in vectors("remoting_frames") if case["label"] == "pull response")
    values = rpc.PULL_MESSAGE.answer(header.decode(unhex(case["frame_json"])[4:]))
    assert values["maxOffset"] == (1 << 63) - 1
    assert values["suggestWhichBrokerId"] == 0


def test_short_names_are_on_the_wire_only():
    command = rpc.SEND_BATCH_MESSAGE.request(
        b"...",
        producerGroup="g",
        topic="t",
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=-1,
        sysFlag=0,
        bornTimestamp=5,
        flag=6,
        properties="",
        maxReconsumeTimes=16,
        batch=True,
    )
    assert command.ext == {
        "a": "g", "b": "t", "c": "TBW102", "d": "4", "e": "-1", "f": "0", "g": "5", "h": "6", "l": "16", "m": "true",
    }  # fmt: skip


def test_oneway():
    command = rpc.UPDATE_CONSUMER_OFFSET.oneway(consumerGroup="g", topic="t", queueId=0, commitOffset=1)
    assert command.flag == Flag.ONEWAY
    assert command.is_oneway


@pytest.mark.parametrize(
    "values",
    [
        {"topic": "t", "queueId": "0"},
        {"topic": "t", "queueId": True},
        {"topic": "t", "queueId": 0.5},
        {"topic": 5, "queueId": 0},
        {"topic": b"t", "queueId": 0},
        {"topic": "t", "queueId": 0, "committed": 1},
        {"topic": "t", "queueId": 0, "queueID": 0},
        {"topic": "", "queueId": 0},
    ],
)
def test_wrong_arguments_are_refused(values):
    with pytest.raises(LocalProtocolError, match="GET_MAX_OFFSET"):
        rpc.GET_MAX_OFFSET.request(**values)


def test_answers_may_have_more_and_less():
    answer = rpc.PULL_MESSAGE.answer(Command(Response.NO_PERMISSION, {"forbiddenType": "3", "new": "x"}))
    assert answer["forbiddenType"] == 3
    assert answer["nextBeginOffset"] is None
    assert "new" not in answer


def test_a_success_without_its_fields_is_refused():
    with pytest.raises(RemoteProtocolError, match="offset"):
        rpc.GET_MAX_OFFSET.answer(Command(Response.SUCCESS))
    with pytest.raises(RemoteProtocolError, match="queueId"):
        rpc.SEND_MESSAGE_V2.answer(Command(Response.SUCCESS, {"msgId": "x", "queueId": "one", "queueOffset": "0"}))


def test_refusals_need_no_fields():
    assert rpc.GET_MAX_OFFSET.reply(Command(30, opaque=4), code=Response.SYSTEM_BUSY, remark="later").ext == {}
    with pytest.raises(LocalProtocolError):
        rpc.GET_MAX_OFFSET.reply(Command(30))


def test_booleans_as_java_reads_them():
    assert rpc.HEART_BEAT.answer(Command(0, {"IS_SUB_CHANGE": "TRUE"}))["IS_SUB_CHANGE"] is True
    assert rpc.HEART_BEAT.answer(Command(0, {"IS_SUB_CHANGE": "1"}))["IS_SUB_CHANGE"] is False


@pytest.mark.parametrize("text", ["9" * 5000, str(1 << 63), "-9223372036854775809", "1e3", "", "½"])
def test_a_number_that_is_no_long_is_refused(text):
    with pytest.raises(RemoteProtocolError, match="offset"):
        rpc.GET_MAX_OFFSET.answer(Command(0, {"offset": text}))


def test_a_long_is_read():
    for number in (-(1 << 63), (1 << 63) - 1):
        assert rpc.GET_MAX_OFFSET.answer(Command(0, {"offset": str(number)})) == {"offset": number}


# Names that Java's classes lack: fields that Java's client or broker reads and writes beside them, or that other releases have.
BESIDE = {
    "boundaryType", "_UNIQUE_KEY_QUERY", "removeOffset", "batch", "maxReconsumeTimes", "MSG_REGION", "TRACE_ON",
}  # fmt: skip


@pytest.mark.parametrize("case", vectors("header_fields"), ids=lambda case: f"{case['name']}-{case['side']}")
def test_fields_have_the_names_and_types_of_javas_headers(case):
    """Both sides of these tests use one table, so a name that is wrong in it would be seen by a live broker alone."""
    row = getattr(rpc, case["name"])
    fields = (row.fields if case["side"] == "request" else row.answer_fields).values()
    assert fields
    mine = {field.wire_name: field.kind for field in fields}
    assert {name: kind for name, kind in mine.items() if name not in BESIDE} == {
        name: case["fields"].get(name) for name in mine if name not in BESIDE
    }
    assert {name for name in mine if name not in case["fields"]} <= BESIDE


def test_every_row_with_fields_is_held_against_javas():
    shown = {case["name"] for case in vectors("header_fields") if case["side"] == "request"}
    assert {row.name for row in ROWS if row.fields} == shown
