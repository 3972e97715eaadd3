import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.body.Connection;

/** Single questions to RocketMQ's own client: what=hash, query, request or producers. Prints one JSON object for each answer. */
public class Peer {
    public static void run(Map options, PrintStream out) throws Exception {
        String what = (String) options.get("what");
        DefaultMQProducer producer = new DefaultMQProducer("witness_peer");
        producer.setInstanceName(Send.instance());
        producer.setNamesrvAddr((String) options.get("nameServer"));
        producer.setSendMsgTimeout(10000);
        producer.start();
        try {
            Peer one = new Peer(producer, out);
            if (what.equals("hash")) {
                one.hash((String) options.get("topic"), (String) options.get("keys"));
            } else if (what.equals("query")) {
                one.query((String) options.get("topic"), (String) options.get("key"));
            } else if (what.equals("request")) {
                one.request((String) options.get("topic"), Integer.parseInt((String) options.get("count")));
            } else {
                one.producers((String) options.get("broker"), (String) options.get("group"));
            }
        } finally {
            producer.shutdown();
        }
    }

    private final DefaultMQProducer producer;
    private final PrintStream out;

    Peer(DefaultMQProducer producer, PrintStream out) {
        this.producer = producer;
        this.out = out;
    }

    /** Sends a message for each key of a JSON array; the queue that it chose. */
    private void hash(String topic, String given) throws Exception {
        for (Iterator keys = JSON.parseArray(given).iterator(); keys.hasNext();) {
            Message message = new Message(topic, "x".getBytes());
            SendResult result = producer.send(message, new SelectMessageQueueByHash(), keys.next());
            say("queue", Integer.valueOf(result.getMessageQueue().getQueueId()));
        }
    }

    /** The ids of the messages that the index finds for a key, as soon as it finds any. */
    private void query(String topic, String key) throws Exception {
        long end = System.currentTimeMillis() + 10000;
        while (System.currentTimeMillis() < end) {
            try {
                long now = System.currentTimeMillis();
                Iterator found = producer.queryMessage(topic, key, 64, now - 600000, now + 60000)
                    .getMessageList().iterator();
                while (found.hasNext()) {
                    say("id", ((MessageExt) found.next()).getMsgId());
                }
                return;
            } catch (MQClientException notYet) {
                Thread.sleep(200);
            }
        }
    }

    /** The bodies of replies to requests 0, 1, and so on, with what the replier's property "by" says. */
    private void request(String topic, int count) throws Exception {
        for (int i = 0; i < count; i++) {
            Message reply = producer.request(new Message(topic, String.valueOf(i).getBytes()), 20000);
            say("reply", new String(reply.getBody(), "UTF-8") + " by " + reply.getProperty("by"));
        }
    }

    /** Client id and language of every connection of a producer group at a broker. */
    private void producers(String broker, String group) throws Exception {
        Iterator found = producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .getProducerConnectionList(broker, group, 3000).getConnectionSet().iterator();
        while (found.hasNext()) {
            Connection connection = (Connection) found.next();
            say("client", connection.getClientId() + " " + connection.getLanguage());
        }
    }

    private void say(String name, Object value) {
        Map line = new LinkedHashMap();
        line.put(name, value);
        out.println(JSON.toJSONString(line));
    }
}
