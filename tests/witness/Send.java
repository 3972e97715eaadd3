import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own producer as a witness; its options are in tests/witness/__init__.py. Prints one JSON object per
 * message that the broker acknowledged. Plain enough for Janino, which knows no lambdas and infers no type arguments.
 */
public class Send {
    private static final int BATCH_BYTES = 1 << 20;

    private final DefaultMQProducer producer = new DefaultMQProducer("witness_send");
    private final PrintStream out;
    private final String topic;
    private final String run;
    private final int size;
    private List queues;
    private int turn;

    Send(Map options, PrintStream out) {
        this.out = out;
        this.topic = (String) options.get("topic");
        this.run = (String) options.get("run");
        this.size = Integer.parseInt((String) options.get("size"));
        this.producer.setInstanceName(instance());
        this.producer.setNamesrvAddr((String) options.get("nameServer"));
        this.producer.setSendMsgTimeout(20000);
        this.producer.setRetryTimesWhenSendFailed(5);
        this.producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
    }

    public static void run(Map options, PrintStream out) throws Exception {
        Send one = new Send(options, out);
        one.producer.start();
        try {
            one.queues = new ArrayList(one.producer.fetchPublishMessageQueues(one.topic));
            Collections.sort(one.queues);
            if (options.containsKey("queues")) {
                one.keep(Arrays.asList(((String) options.get("queues")).split(",")));
            }
            String[] kinds = ((String) options.get("kinds")).split(",");
            int first = Integer.parseInt((String) options.get("first"));
            int count = Integer.parseInt((String) options.get("count"));
            one.send(kinds, first, count, Integer.parseInt((String) options.get("batch")));
        } finally {
            one.producer.shutdown();
        }
    }

    static Map options(String[] arguments) {
        Map found = new LinkedHashMap();
        for (int i = 0; i < arguments.length; i++) {
            int at = arguments[i].indexOf('=');
            found.put(arguments[i].substring(0, at), arguments[i].substring(at + 1));
        }
        return found;
    }

    /** Clients of one name share their connections and name server; each call is a client of its own. */
    static String instance() {
        return "witness-" + System.nanoTime();
    }

    private void send(String[] kinds, int first, int count, int batch) throws Exception {
        List company = new ArrayList();
        int bytes = 0;
        for (int i = first; i < first + count; i++) {
            String kind = kinds[i % kinds.length];
            boolean compressed = kind.equals("zlib") || kind.equals("lz4") || kind.equals("zstd");
            Object[] item = new Object[] {Integer.valueOf(i), kind, message(i, kind), null};
            Message message = (Message) item[2];
            item[3] = md5(message.getBody());
            if (batch < 2 || compressed) {
                single(item, compressed ? kind : null);
                continue;
            }
            if (company.size() >= batch || (bytes > 0 && bytes + message.getBody().length > BATCH_BYTES)) {
                batch(company);
                company = new ArrayList();
                bytes = 0;
            }
            company.add(item);
            bytes += message.getBody().length + 500;
        }
        if (!company.isEmpty()) {
            batch(company);
        }
    }

    /** To the queues with these ids alone. */
    private void keep(List ids) {
        for (Iterator all = queues.iterator(); all.hasNext();) {
            if (!ids.contains(String.valueOf(((MessageQueue) all.next()).getQueueId()))) {
                all.remove();
            }
        }
    }

    private MessageQueue next() {
        return (MessageQueue) queues.get(turn++ % queues.size());
    }

    private void single(Object[] item, String compression) throws Exception {
        producer.setCompressMsgBodyOverHowmuch(compression == null ? Integer.MAX_VALUE : 1);
        if (compression != null) {
            producer.setCompressType(CompressionType.of(compression.toUpperCase()));
        }
        int length = ((Message) item[2]).getBody().length;
        SendResult result = producer.send((Message) item[2], next());
        print(item, result, result.getMsgId(), result.getQueueOffset(), length);
    }

    private void batch(List company) throws Exception {
        List messages = new ArrayList();
        for (Iterator all = company.iterator(); all.hasNext();) {
            messages.add(((Object[]) all.next())[2]);
        }
        SendResult result = producer.send(messages, next());
        String[] ids = result.getMsgId().split(",");
        for (int i = 0; i < company.size(); i++) {
            Object[] item = (Object[]) company.get(i);
            // A batch topic answers with the batch's id alone.
            String id = ids.length == company.size() ? ids[i] : MessageClientIDSetter.getUniqID((Message) item[2]);
            print(item, result, id, result.getQueueOffset() + i, ((Message) item[2]).getBody().length);
        }
    }

    private void print(Object[] item, SendResult result, String id, long offset, int length) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
        Message message = (Message) item[2];
        Map line = new LinkedHashMap();
        line.put("index", item[0]);
        line.put("kind", item[1]);
        line.put("id", id);
        line.put("broker", result.getMessageQueue().getBrokerName());
        line.put("queue", Integer.valueOf(result.getMessageQueue().getQueueId()));
        line.put("offset", Long.valueOf(offset));
        line.put("size", Integer.valueOf(length));
        line.put("md5", item[3]);
        line.put("properties", message.getProperties());
        out.println(JSON.toJSONString(line));
    }

    private Message message(int i, String kind) throws Exception {
        Message message = new Message(topic, body(i, kind));
        if (kind.equals("bare")) {
            return message;
        }
        if (kind.equals("emptytag")) {
            message.setTags("");
            message.setKeys("");
            message.putUserProperty("run", run);
        } else if (kind.equals("unicode")) {
            message.setTags("标签" + i % 3);
            message.setKeys(Arrays.asList(new String[] {"ключ" + i, "schlüssel" + i}));
            message.putUserProperty("región", "日本 🚀 " + i);
            message.putUserProperty("run", run);
        } else {
            message.setTags("tag" + i % 3);
            message.setKeys("key" + i);
            message.putUserProperty("run", run);
            message.putUserProperty("number", String.valueOf(i));
        }
        return message;
    }

    private byte[] body(int i, String kind) throws Exception {
        if (kind.equals("big")) {
            byte[] random = new byte[60 << 10];
            new Random(i).nextBytes(random);
            return random;
        }
        StringBuilder text = new StringBuilder(run).append(':').append(i).append(':');
        String filling = kind.equals("unicode") ? "消息 é 🚀 " : "0123456789abcdef";
        int length = kind.equals("zlib") || kind.equals("lz4") || kind.equals("zstd") ? Math.max(size, 8000) : size;
        while (text.length() < length) {
            text.append(filling);
        }
        text.setLength(Math.max(length, run.length() + 12));
        return text.toString().getBytes("UTF-8");
    }

    static String md5(byte[] content) throws Exception {
        byte[] digest = MessageDigest.getInstance("MD5").digest(content);
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < digest.length; i++) {
            text.append(Character.forDigit((digest[i] >> 4) & 15, 16)).append(Character.forDigit(digest[i] & 15, 16));
        }
        return text.toString();
    }
}
