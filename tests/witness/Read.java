import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.Base64;
import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own consumer as a witness: prints everything that the queues of a topic (or of A,B) hold now, one JSON object each. With
 * count it waits until it has seen so many, for as long as some come within 20 s; bodies=true prints these, too.
 */
public class Read {
    public static void main(String[] arguments) throws Exception {
        Map options = Send.options(arguments);
        String[] topics = ((String) options.get("topic")).split(",");
        PrintStream out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, "UTF-8");
        out = new PrintStream(new java.io.BufferedOutputStream(out, 1 << 16), false, "UTF-8");
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("witness_read");
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.start();
        Read one = new Read(consumer, out, "true".equals(options.get("bodies")));
        TreeSet queues = new TreeSet();
        for (int i = 0; i < topics.length; i++) {
            queues.addAll(consumer.fetchSubscribeMessageQueues(topics[i]));
        }
        long count = Long.parseLong((String) options.get("count"));
        long until = System.currentTimeMillis() + 20000;
        // One pull after the other: a LitePull consumer may show again what it had before it was told to seek.
        do {
            long before = one.seen;
            for (Iterator all = queues.iterator(); all.hasNext();) {
                one.read((MessageQueue) all.next());
            }
            if (one.seen > before) {
                until = System.currentTimeMillis() + 20000;
            } else if (one.seen < count) {
                Thread.sleep(20);
            }
        } while (one.seen < count && System.currentTimeMillis() < until);
        out.flush();
        System.exit(0);
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

    private void read(MessageQueue queue) throws Exception {
        Long first = (Long) next.get(queue);
        long end = consumer.maxOffset(queue);
        long at = first == null ? consumer.minOffset(queue) : first.longValue();
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
