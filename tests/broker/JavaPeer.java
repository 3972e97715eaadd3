import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's own client, for comparison: java -cp jars JavaPeer.java COMMAND NAME_SERVER TOPIC [ARGUMENT]. */
public class JavaPeer {
    /** Begins each line of the result: the logging that RocketMQ brings along also prints. */
    static final String RESULT = "> ";

    public static void main(String[] args) throws Exception {
        switch (args[0]) {
            case "hash": hash(args[1], args[2]); break;
            case "read": read(args[1], args[2], Integer.parseInt(args[3])); break;
            case "query": query(args[1], args[2], args[3]); break;
            case "producers": producers(args[1], args[2], args[3]); break;
            default: throw new IllegalArgumentException(args[0]);
        }
        System.exit(0);
    }

    /** Sends one message per line of standard input (base64 of a key) and prints the queue that the key chose. */
    static void hash(String nameServer, String topic) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder out = new StringBuilder();
        for (String line; (line = in.readLine()) != null; ) {
            String key = text(line);
            Message message = new Message(topic, "x".getBytes());
            out.append(RESULT);
            out.append(producer.send(message, new SelectMessageQueueByHash(), key).getMessageQueue().getQueueId());
            out.append('\n');
        }
        System.out.print(out);
    }

    /** Prints messages of a topic until it has seen enough, or none came for 20 s: queue, offset, id, flag, and base64 of body, tags, keys, properties. */
    static void read(String nameServer, String topic, int count) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("java_peer_" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        consumer.start();
        // One pull after the other: a LitePull consumer may show again what it had before it was told to seek.
        Map<MessageQueue, Long> next = new TreeMap<>();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            next.put(queue, consumer.minOffset(queue));
        }
        long end = System.currentTimeMillis() + 20_000;
        int seen = 0;
        while (seen < count && System.currentTimeMillis() < end) {
            for (Map.Entry<MessageQueue, Long> at : next.entrySet()) {
                PullResult result = consumer.pull(at.getKey(), "*", at.getValue(), 32, 20_000);
                if (result.getPullStatus() != PullStatus.FOUND) {
                    continue;
                }
                for (MessageExt message : result.getMsgFoundList()) {
                    seen++;
                    show(message);
                }
                at.setValue(result.getNextBeginOffset());
                end = System.currentTimeMillis() + 20_000;
            }
        }
    }

    static void show(MessageExt message) {
        StringBuilder properties = new StringBuilder();
        for (Map.Entry<String, String> entry : message.getProperties().entrySet()) {
            properties.append(entry.getKey()).append('\u0001').append(entry.getValue()).append('\u0002');
        }
        say(String.join(" ", "" + message.getQueueId(), "" + message.getQueueOffset(),
            message.getMsgId(), "" + message.getFlag(), base64(message.getBody()),
            base64(bytes(message.getTags())), base64(bytes(message.getKeys())),
            base64(bytes(properties.toString()))));
    }

    /** Prints the ids of the messages that the index finds for a key. */
    @SuppressWarnings("deprecation")
    static void query(String nameServer, String topic, String key) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        long end = System.currentTimeMillis() + 10_000;
        while (System.currentTimeMillis() < end) {
            try {
                long now = System.currentTimeMillis();
                for (MessageExt message : producer.queryMessage(topic, key, 64, now - 600_000, now + 60_000)
                        .getMessageList()) {
                    say(message.getMsgId());
                }
                return;
            } catch (org.apache.rocketmq.client.exception.MQClientException notYet) {
                Thread.sleep(200);
            }
        }
    }

    /** Prints client id and language of every connection of a producer group at a broker. */
    static void producers(String nameServer, String broker, String group) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .getProducerConnectionList(broker, group, 3000).getConnectionSet()
            .forEach(each -> say(each.getClientId() + " " + each.getLanguage()));
    }

    static DefaultMQProducer producer(String nameServer) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java_peer");
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        return producer;
    }

    static void say(String line) {
        System.out.println(RESULT + line);
    }

    static String text(String base64) {
        return new String(Base64.getDecoder().decode(base64), StandardCharsets.UTF_8);
    }

    static byte[] bytes(String text) {
        return (text == null ? "" : text).getBytes(StandardCharsets.UTF_8);
    }

    static String base64(byte[] data) {
        return data.length == 0 ? "-" : Base64.getEncoder().encodeToString(data);
    }
}
