import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.Base64;
import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own consumer as a witness: prints everything that the queues of a topic (or of A,B) hold now, one JSON object each. With
 * count it waits until it has seen so many, for as long as some come within 20 s, and for the topics; bodies=true prints these, too.
 */
public class Read {
    public static void run(Map options, PrintStream out) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("witness_read");
        consumer.setInstanceName(Send.instance());
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.start();
        try {
            Read one = new Read(consumer, out, "true".equals(options.get("bodies")));
            one.read(((String) options.get("topic")).split(","), Long.parseLong((String) options.get("count")));
        } finally {
            consumer.shutdown();
        }
    }

    private final DefaultMQPullConsumer consumer;
    private final PrintStream out;
    private final boolean bodies;
    private final Map next = new HashMap();
    private long seen;

    Read(DefaultMQPullConsumer consumer, PrintStream out, boolean bodies) {
        this.consumer = consumer;
        this.out = out;
        this.bodies = bodies;
    }

    private void read(String[] topics, long count) throws Exception {
        long until = System.currentTimeMillis() + 20000;
        TreeSet queues = new TreeSet();
        for (int i = 0; i < topics.length; i++) {
            queues.addAll(queuesOf(topics[i], count > 0 ? until : 0));
        }
        // One pull after the other: a LitePull consumer may show again what it had before it was told to seek.
        do {
            long before = seen;
            for (Iterator all = queues.iterator(); all.hasNext();) {
                read((MessageQueue) all.next());
            }
            if (seen > before) {
                until = System.currentTimeMillis() + 20000;
            } else if (seen < count) {
                Thread.sleep(20);
            }
        } while (seen < count && System.currentTimeMillis() < until);
        if (seen < count) {
            throw new IllegalStateException(seen + " of " + count + " messages, and no more for 20 s");
        }
    }

    /** The topic of dead letters, for one, is made by the first of them. */
    private Set queuesOf(String topic, long until) throws Exception {
        while (true) {
            try {
                return consumer.fetchSubscribeMessageQueues(topic);
            } catch (MQClientException e) {
                if (System.currentTimeMillis() > until) {
                    throw e;
                }
                Thread.sleep(20);
            }
        }
    }

    private void read(MessageQueue queue) throws Exception {
        Long first = (Long) next.get(queue);
        long end = consumer.maxOffset(queue);
        long at = first == null ? Math.max(0, consumer.minOffset(queue)) : first.longValue();
        while (at < end) {
            PullResult result = consumer.pull(queue, "*", at, 32, 20000);
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (Iterator found = result.getMsgFoundList().iterator(); found.hasNext();) {
                    seen++;
                    print((MessageExt) found.next(), queue);
                }
            } else if (result.getNextBeginOffset() <= at) {
                throw new IllegalStateException(queue + " at " + at + " of " + end + ": " + result);
            }
            at = result.getNextBeginOffset();
        }
        next.put(queue, Long.valueOf(at));
    }

    private void print(MessageExt message, MessageQueue queue) throws Exception {
        Map line = new LinkedHashMap();
        line.put("id", message.getMsgId());
        line.put("topic", queue.getTopic());
        line.put("broker", queue.getBrokerName());
        line.put("queue", Integer.valueOf(message.getQueueId()));
        line.put("offset", Long.valueOf(message.getQueueOffset()));
        line.put("size", Integer.valueOf(message.getBody().length));
        line.put("md5", Send.md5(message.getBody()));
        line.put("born", Long.valueOf(message.getBornTimestamp()));
        line.put("stored", Long.valueOf(message.getStoreTimestamp()));
        line.put("seen", Long.valueOf(System.currentTimeMillis()));
        line.put("flag", Integer.valueOf(message.getFlag()));
        if (bodies) {
            line.put("text", Base64.getEncoder().encodeToString(message.getBody()));
        }
        line.put("properties", message.getProperties());
        out.println(JSON.toJSONString(line));
    }
}
