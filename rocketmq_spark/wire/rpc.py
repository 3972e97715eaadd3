"""One row per request: its code, its fields with types, and the fields of its answer.

A row makes commands from keyword arguments and decodes answers into typed values, so that field names and their texts
exist here only. Names are those of the protocol (camelCase). Some requests have single letters as names on the wire, but their
arguments have the long names. Bodies are in ``bodies.py`` and ``messages.py``.

Notation of a field: ``name``, ``name:int`` or ``name:bool``; ``!`` marks a required field, ``=x`` its name on the wire.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.base.codes import Flag, PullSysFlag, Request, Response
from rocketmq_spark.errors import LocalProtocolError, RemoteProtocolError
from rocketmq_spark.wire.header import Bytes, Command

_LONG = 1 << 63  # no field has more than Java's long
_PLAIN_TYPES = {"str": str, "int": int}  # types whose text is str(value)
_FIELD = re.compile(r"(?P<name>\w+)(:(?P<kind>int|bool))?(?P<required>!)?(=(?P<wire>\w+))?")


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of a header's string map."""

    name: str
    kind: str = "str"
    is_required: bool = False
    wire_name: str = ""

    def text(self, value: Any) -> str:
        """The field's text on the wire; raises ``TypeError`` for a value of another type."""
        if self.kind == "bool":
            if value is not True and value is not False:
                raise TypeError(f"{self.name} must be a bool, not {value!r}")
            return "true" if value else "false"
        if self.kind == "int":
            if isinstance(value, bool):
                raise TypeError(f"{self.name} must be an int, not {value!r}")
            return str(int(operator.index(value)))
        if not isinstance(value, str):
            raise TypeError(f"{self.name} must be a str, not {value!r}")
        return value

    def value(self, text: str) -> Any:
        """The value of a text on the wire. Raises ``ValueError``. As in Java, a bool is true only if its text is "true"."""
        if self.kind == "int":
            number = int(text)
            if not -_LONG <= number < _LONG:
                raise ValueError("it does not fit 64 bits")
            return number
        return text.lower() == "true" if self.kind == "bool" else text


class Fields(dict[str, Field]):
    """The fields of a request or an answer by name; ``required_names`` has the wire names of the required fields."""

    required_names: frozenset[str] = frozenset()


def _fields(notation: str) -> Fields:
    fields = Fields()
    for item in notation.split():
        match = _FIELD.fullmatch(item)
        assert match is not None, item
        name = match["name"]
        fields[name] = Field(name, match["kind"] or "str", match["required"] is not None, match["wire"] or name)
    fields.required_names = frozenset(field.wire_name for field in fields.values() if field.is_required)
    return fields


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request and its answer."""

    code: Request
    fields: Fields
    answer_fields: Fields

    @property
    def name(self) -> str:
        return self.code.name

    def request(self, /, body: Bytes = b"", **values: Any) -> Command:
        """The command with these fields; None and empty texts are omitted."""
        return Command(self.code, self._encode(self.fields, values), body)

    def oneway(self, /, body: Bytes = b"", **values: Any) -> Command:
        """Like ``request``, but the server will not answer it."""
        return Command(self.code, self._encode(self.fields, values), body, flag=Flag.ONEWAY)

    def reply(
        self,
        request: Command,
        /,
        body: Bytes = b"",
        code: int = Response.SUCCESS,
        remark: str | None = None,
        **values: Any,
    ) -> Command:
        """The answer to ``request``. Only an answer with code SUCCESS must have all required fields."""
        ext = self._encode(self.answer_fields, values, code == Response.SUCCESS)
        return Command(code, ext, body, request.opaque, Flag.RESPONSE, remark)

    def arguments(self, command: Command) -> dict[str, Any]:
        """The request's fields as values, None for absent fields: for requests that a broker sends to this client."""
        return self._decode(self.fields, command, True)

    def answer(self, command: Command) -> dict[str, Any]:
        """The answer's fields as values, None for absent fields. Fields that the row does not name are ignored."""
        return self._decode(self.answer_fields, command, command.code == Response.SUCCESS)

    def _encode(self, fields: Fields, values: Mapping[str, Any], must_be_complete: bool = True) -> dict[str, str]:
        ext: dict[str, str] = {}
        for name, value in values.items():
            field = fields.get(name) or _COMMON_FIELDS.get(name)
            if field is None:
                raise LocalProtocolError(f"{self.name} has no field {name}")
            if value is None or value == "":
                continue
            if type(value) is _PLAIN_TYPES.get(field.kind):  # a fast path for nearly all values; the others are checked
                ext[field.wire_name] = str(value)
                continue
            try:
                ext[field.wire_name] = field.text(value)
            except TypeError as exc:
                raise LocalProtocolError(f"{self.name}: {exc}") from exc
        if must_be_complete and not fields.required_names <= ext.keys():
            missing_name = next(
                field.name for field in fields.values() if field.is_required and field.wire_name not in ext
            )
            raise LocalProtocolError(f"{self.name} needs the field {missing_name}")
        return ext

    def _decode(self, fields: Mapping[str, Field], command: Command, must_be_complete: bool) -> dict[str, Any]:
        ext = command.ext
        values: dict[str, Any] = {}
        for name, field in fields.items():
            text = ext.get(field.wire_name)
            if text is None:
                if must_be_complete and field.is_required:
                    raise RemoteProtocolError(f"{self.name} came without the field {name}")
                values[name] = None
                continue
            try:
                values[name] = field.value(text)
            except ValueError as exc:
                raise RemoteProtocolError(f"{self.name} came with {name} = {text[:80]!r}") from exc
        return values


# Fields of every request: namespace, whether names contain the namespace, broker name (static topics), one-way, logical queue.
_COMMON_FIELDS = _fields("ns nsd:bool bname oway:bool lo:bool")

_TOPIC = "topic!"
_QUEUE = "topic! queueId:int!"
_OFFSET = "offset:int!"

_PULL = (
    "consumerGroup! topic! queueId:int! queueOffset:int! maxMsgNums:int! sysFlag:int! commitOffset:int!"
    " suspendTimeoutMillis:int! subscription subVersion:int! expressionType maxMsgBytes:int requestSource:int"
    " proxyFrowardClientId liteTopic"
)
_PULL_ANSWER = (
    "suggestWhichBrokerId:int nextBeginOffset:int! minOffset:int! maxOffset:int! offsetDelta:int topicSysFlag:int"
    " groupSysFlag:int forbiddenType:int"
)
_SEND = (
    "producerGroup! topic! defaultTopic! defaultTopicQueueNums:int! queueId:int! sysFlag:int! bornTimestamp:int!"
    " flag:int! properties reconsumeTimes:int unitMode:bool batch:bool maxReconsumeTimes:int"
)
_SEND_V2 = (
    "producerGroup!=a topic!=b defaultTopic!=c defaultTopicQueueNums:int!=d queueId:int!=e sysFlag:int!=f"
    " bornTimestamp:int!=g flag:int!=h properties=i reconsumeTimes:int=j unitMode:bool=k maxReconsumeTimes:int=l"
    " batch:bool=m brokerName=n"
)
_SEND_ANSWER = "msgId! queueId:int! queueOffset:int! transactionId batchUniqId recallHandle MSG_REGION TRACE_ON:bool"

row_by_code: dict[int, RequestRow] = {}


def _row(code: Request, fields: str = "", answer: str = "") -> RequestRow:
    row = RequestRow(code, _fields(fields), _fields(answer))
    row_by_code[code] = row
    return row


# Name server
GET_ROUTEINFO_BY_TOPIC = _row(Request.GET_ROUTEINFO_BY_TOPIC, "topic! acceptStandardJsonOnly:bool")
GET_BROKER_CLUSTER_INFO = _row(Request.GET_BROKER_CLUSTER_INFO)
GET_ALL_TOPIC_LIST_FROM_NAMESERVER = _row(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
DELETE_TOPIC_IN_NAMESRV = _row(Request.DELETE_TOPIC_IN_NAMESRV, "topic! clusterName")
REGISTER_TOPIC_IN_NAMESRV = _row(Request.REGISTER_TOPIC_IN_NAMESRV, "topic!")

# Topics
UPDATE_AND_CREATE_TOPIC = _row(
    Request.UPDATE_AND_CREATE_TOPIC,
    "topic! defaultTopic! readQueueNums:int! writeQueueNums:int! perm:int! topicFilterType! topicSysFlag:int"
    " order:bool! attributes force:bool",
)
DELETE_TOPIC_IN_BROKER = _row(Request.DELETE_TOPIC_IN_BROKER, _TOPIC)
GET_TOPIC_CONFIG = _row(Request.GET_TOPIC_CONFIG, _TOPIC)
GET_ALL_TOPIC_CONFIG = _row(
    Request.GET_ALL_TOPIC_CONFIG, "topicSeq:int dataVersion maxTopicNum:int", "totalTopicNum:int"
)
GET_TOPIC_STATS_INFO = _row(Request.GET_TOPIC_STATS_INFO, _TOPIC)
QUERY_TOPIC_CONSUME_BY_WHO = _row(Request.QUERY_TOPIC_CONSUME_BY_WHO, _TOPIC)

# Offsets of a queue
SEARCH_OFFSET_BY_TIMESTAMP = _row(
    Request.SEARCH_OFFSET_BY_TIMESTAMP, f"{_QUEUE} timestamp:int! boundaryType liteTopic", _OFFSET
)
GET_MAX_OFFSET = _row(Request.GET_MAX_OFFSET, f"{_QUEUE} committed:bool", _OFFSET)
GET_MIN_OFFSET = _row(Request.GET_MIN_OFFSET, _QUEUE, _OFFSET)
GET_EARLIEST_MSG_STORETIME = _row(Request.GET_EARLIEST_MSG_STORETIME, _QUEUE, "timestamp:int!")

# Reading
PULL_MESSAGE = _row(Request.PULL_MESSAGE, _PULL, _PULL_ANSWER)
# Fields of a pull that is answered at once and changes nothing on the broker.
IMMEDIATE_PULL: dict[str, Any] = {
    "sysFlag": PullSysFlag.SUBSCRIPTION,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subVersion": 0,
}
QUERY_MESSAGE = _row(
    Request.QUERY_MESSAGE,
    "topic! key! maxNum:int! beginTimestamp:int! endTimestamp:int! indexType lastKey _UNIQUE_KEY_QUERY:bool",
    "indexLastUpdateTimestamp:int indexLastUpdatePhyoffset:int",
)
VIEW_MESSAGE_BY_ID = _row(Request.VIEW_MESSAGE_BY_ID, "offset:int! topic")

# Writing
SEND_MESSAGE = _row(Request.SEND_MESSAGE, _SEND, _SEND_ANSWER)
SEND_MESSAGE_V2 = _row(Request.SEND_MESSAGE_V2, _SEND_V2, _SEND_ANSWER)
SEND_BATCH_MESSAGE = _row(Request.SEND_BATCH_MESSAGE, _SEND_V2, _SEND_ANSWER)
SEND_REPLY_MESSAGE_V2 = _row(Request.SEND_REPLY_MESSAGE_V2, _SEND_V2, _SEND_ANSWER)
RECALL_MESSAGE = _row(Request.RECALL_MESSAGE, "topic! recallHandle! producerGroup", "msgId!")
END_TRANSACTION = _row(
    Request.END_TRANSACTION,
    "topic producerGroup! tranStateTableOffset:int! commitLogOffset:int! commitOrRollback:int!"
    " fromTransactionCheck:bool msgId! transactionId",
)

# Consumer groups
HEART_BEAT = _row(Request.HEART_BEAT, "", "IS_SUPPORT_HEART_BEAT_V2:bool IS_SUB_CHANGE:bool")
UNREGISTER_CLIENT = _row(Request.UNREGISTER_CLIENT, "clientID! producerGroup consumerGroup")
CHECK_CLIENT_CONFIG = _row(Request.CHECK_CLIENT_CONFIG)
GET_CONSUMER_LIST_BY_GROUP = _row(Request.GET_CONSUMER_LIST_BY_GROUP, "consumerGroup!")
GET_CONSUMER_CONNECTION_LIST = _row(Request.GET_CONSUMER_CONNECTION_LIST, "consumerGroup!")
QUERY_CONSUMER_OFFSET = _row(Request.QUERY_CONSUMER_OFFSET, f"consumerGroup! {_QUEUE} setZeroIfNotFound:bool", _OFFSET)
UPDATE_CONSUMER_OFFSET = _row(Request.UPDATE_CONSUMER_OFFSET, f"consumerGroup! {_QUEUE} commitOffset:int!")
CONSUMER_SEND_MSG_BACK = _row(
    Request.CONSUMER_SEND_MSG_BACK,
    "offset:int! group! delayLevel:int! originMsgId originTopic unitMode:bool maxReconsumeTimes:int",
)
LOCK_BATCH_MQ = _row(Request.LOCK_BATCH_MQ)
UNLOCK_BATCH_MQ = _row(Request.UNLOCK_BATCH_MQ)
QUERY_ASSIGNMENT = _row(Request.QUERY_ASSIGNMENT)
GET_CONSUME_STATS = _row(Request.GET_CONSUME_STATS, "consumerGroup! topic topicList")
INVOKE_BROKER_TO_RESET_OFFSET = _row(
    Request.INVOKE_BROKER_TO_RESET_OFFSET, "group! topic! queueId:int offset:int timestamp:int! isForce:bool!"
)
UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = _row(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
DELETE_SUBSCRIPTIONGROUP = _row(Request.DELETE_SUBSCRIPTIONGROUP, "groupName! cleanOffset:bool removeOffset:bool")
GET_ALL_SUBSCRIPTIONGROUP_CONFIG = _row(
    Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "groupSeq:int dataVersion maxGroupNum:int", "totalGroupNum:int"
)

# Brokers
UPDATE_BROKER_CONFIG = _row(Request.UPDATE_BROKER_CONFIG)
GET_BROKER_CONFIG = _row(Request.GET_BROKER_CONFIG, "", "version")
GET_BROKER_RUNTIME_INFO = _row(Request.GET_BROKER_RUNTIME_INFO)

# Users and policies of ACL 2.0
AUTH_CREATE_USER = _row(Request.AUTH_CREATE_USER, "username!")
AUTH_UPDATE_USER = _row(Request.AUTH_UPDATE_USER, "username!")
AUTH_DELETE_USER = _row(Request.AUTH_DELETE_USER, "username!")
AUTH_GET_USER = _row(Request.AUTH_GET_USER, "username!")
AUTH_LIST_USER = _row(Request.AUTH_LIST_USER, "filter")
AUTH_UPDATE_ACL = _row(Request.AUTH_UPDATE_ACL, "subject!")
AUTH_DELETE_ACL = _row(Request.AUTH_DELETE_ACL, "subject! policyType resource")
AUTH_LIST_ACL = _row(Request.AUTH_LIST_ACL, "subjectFilter resourceFilter")

# Requests of brokers to this client
CHECK_TRANSACTION_STATE = _row(
    Request.CHECK_TRANSACTION_STATE,
    "topic tranStateTableOffset:int! commitLogOffset:int! msgId transactionId offsetMsgId",
)
PUSH_REPLY_MESSAGE_TO_CLIENT = _row(
    Request.PUSH_REPLY_MESSAGE_TO_CLIENT, f"{_SEND} bornHost storeHost storeTimestamp:int!"
)
NOTIFY_CONSUMER_IDS_CHANGED = _row(Request.NOTIFY_CONSUMER_IDS_CHANGED, "consumerGroup!")
RESET_CONSUMER_CLIENT_OFFSET = _row(
    Request.RESET_CONSUMER_CLIENT_OFFSET, "topic! group! queueId:int offset:int timestamp:int isForce:bool"
)
GET_CONSUMER_STATUS_FROM_CLIENT = _row(Request.GET_CONSUMER_STATUS_FROM_CLIENT, "topic! group! clientAddr")
GET_CONSUMER_RUNNING_INFO = _row(Request.GET_CONSUMER_RUNNING_INFO, "consumerGroup! clientId! jstackEnable:bool")
CONSUME_MESSAGE_DIRECTLY = _row(
    Request.CONSUME_MESSAGE_DIRECTLY,
    "consumerGroup! clientId msgId brokerName topic topicSysFlag:int groupSysFlag:int",
)
