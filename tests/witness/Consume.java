import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's own member of a consumer group: prints what its listener gets, one JSON object each, until its standard input
 * ends; then it leaves the group. With fail=true the listener fails each time.
 */
public class Consume implements MessageListenerConcurrently {
    public static void main(String[] arguments) throws Exception {
        Map options = Send.options(arguments);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer((String) options.get("group"));
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe((String) options.get("topic"), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) new Consume("true".equals(options.get("fail"))));
        consumer.start();
        while (System.in.read() >= 0) {
        }
        consumer.shutdown();
        System.exit(0);
    }

    private final boolean fail;
    private final PrintStream out;

    Consume(boolean fail) throws Exception {
        this.fail = fail;
        this.out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true, "UTF-8");
    }

    public ConsumeConcurrentlyStatus consumeMessage(List messages, ConsumeConcurrentlyContext context) {
        for (Iterator all = messages.iterator(); all.hasNext();) {
            MessageExt message = (MessageExt) all.next();
            Map line = new LinkedHashMap();
            line.put("body", new String(message.getBody(), java.nio.charset.StandardCharsets.UTF_8));
            line.put("queue", Integer.valueOf(message.getQueueId()));
            line.put("offset", Long.valueOf(message.getQueueOffset()));
            line.put("times", Integer.valueOf(message.getReconsumeTimes()));
            synchronized (out) {
                out.println(JSON.toJSONString(line));
            }
        }
        return fail ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
