import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's own consumer as a witness: prints everything that the queues of a topic hold now, one JSON object each. */
public class Read {
    public static void main(String[] arguments) throws Exception {
        Map options = Send.options(arguments);
        String topic = (String) options.get("topic");
        PrintStream out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, "UTF-8");
        out = new PrintStream(new java.io.BufferedOutputStream(out, 1 << 16), false, "UTF-8");
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("witness_read");
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.start();
        for (Iterator all = new TreeSet(consumer.fetchSubscribeMessageQueues(topic)).iterator(); all.hasNext();) {
            read(consumer, (MessageQueue) all.next(), out);
        }
        out.flush();
        System.exit(0);
    }

    private static void read(DefaultMQPullConsumer consumer, MessageQueue queue, PrintStream out) throws Exception {
        long end = consumer.maxOffset(queue);
        long at = consumer.minOffset(queue);
        while (at < end) {
            PullResult result = consumer.pull(queue, "*", at, 32, 20000);
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (Iterator found = result.getMsgFoundList().iterator(); found.hasNext();) {
                    print((MessageExt) found.next(), queue, out);
                }
            } else if (result.getNextBeginOffset() <= at) {
                throw new IllegalStateException(queue + " at " + at + " of " + end + ": " + result);
            }
            at = result.getNextBeginOffset();
        }
    }

    private static void print(MessageExt message, MessageQueue queue, PrintStream out) throws Exception {
        Map line = new LinkedHashMap();
        line.put("id", message.getMsgId());
        line.put("broker", queue.getBrokerName());
        line.put("queue", Integer.valueOf(message.getQueueId()));
        line.put("offset", Long.valueOf(message.getQueueOffset()));
        line.put("size", Integer.valueOf(message.getBody().length));
        line.put("md5", Send.md5(message.getBody()));
        line.put("born", Long.valueOf(message.getBornTimestamp()));
        line.put("stored", Long.valueOf(message.getStoreTimestamp()));
        line.put("properties", message.getProperties());
        out.println(JSON.toJSONString(line));
    }
}
