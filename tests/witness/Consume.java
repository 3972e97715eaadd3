import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own member of a consumer group: prints what its listener gets, one JSON object each, until its standard input
 * ends; then it leaves the group. With fail=true the listener fails each time, tries=N times before a message is a dead
 * letter; with fail=some it does as tests/live/environment says. With ordered=true it is an orderly one; ordered=NAME is a
 * second member, orderly, of that group. With queues=0,3 its strategy is that of an environment with those queues. With
 * lite=true it is a LitePull consumer. tags=EXPRESSION is what it subscribes to. With reply=true it answers requests: "java:" and
 * their body.
 */
public class Consume {
    private static final PrintStream OUT = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true);

    private static volatile boolean ended;

    public static void main(String[] arguments) throws Exception {
        Map options = Send.options(arguments);
        String group = (String) options.get("group");
        String ordered = (String) options.get("ordered");
        if ("true".equals(options.get("lite"))) {
            poll(options, group);
        }
        boolean only = "true".equals(ordered);
        DefaultMQPushConsumer first = started(options, group, only);
        DefaultMQPushConsumer second = ordered == null || only ? null : started(options, ordered, true);
        say("started", Long.valueOf(System.currentTimeMillis()));
        while (System.in.read() >= 0) {
        }
        first.shutdown();
        if (second != null) {
            second.shutdown();
        }
        System.exit(0);
    }

    private static DefaultMQPushConsumer started(Map options, String group, boolean orderly) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        // Else what is on its way back to the broker when it leaves is sent a second time.
        consumer.setAwaitTerminationMillisWhenShutdown(10000);
        if (options.containsKey("tries")) {
            consumer.setMaxReconsumeTimes(Integer.parseInt((String) options.get("tries")));
        }
        consumer.subscribe((String) options.get("topic"), tags(options));
        if (options.containsKey("queues")) {
            List ids = Arrays.asList(((String) options.get("queues")).split(","));
            consumer.setAllocateMessageQueueStrategy(new OfEnvironment(ids));
        }
        Consume listener = new Consume(group, (String) options.get("fail"));
        if ("true".equals(options.get("reply"))) {
            listener.replier = new DefaultMQProducer(group + "_replier");
            listener.replier.setNamesrvAddr((String) options.get("nameServer"));
            listener.replier.start();
        }
        if (orderly) {
            consumer.registerMessageListener((MessageListenerOrderly) listener.new Orderly());
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) listener.new Concurrently());
        }
        consumer.start();
        return consumer;
    }

    private static String tags(Map options) {
        return options.containsKey("tags") ? (String) options.get("tags") : "*";
    }

    private static void poll(Map options, String group) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        consumer.setNamesrvAddr((String) options.get("nameServer"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe((String) options.get("topic"), tags(options));
        consumer.start();
        say("started", Long.valueOf(System.currentTimeMillis()));
        Consume listener = new Consume(group, null);
        Thread watch = new Thread() {
            public void run() {
                try {
                    while (System.in.read() >= 0) {
                    }
                } catch (java.io.IOException e) {
                    // as good as its end
                }
                ended = true;
            }
        };
        watch.start();
        while (!ended) {
            listener.note(consumer.poll(200));
        }
        consumer.shutdown();
        System.exit(0);
    }

    private static void say(String name, Object value) {
        Map line = new LinkedHashMap();
        line.put(name, value);
        OUT.println(JSON.toJSONString(line));
    }

    private final String group;
    private final String fail;
    private DefaultMQProducer replier;

    Consume(String group, String fail) {
        this.group = group;
        this.fail = fail;
    }

    /** The rule of an environment that has some queues of each topic; those of its own retry topic are shared as ever. */
    private static class OfEnvironment implements AllocateMessageQueueStrategy {
        private final AllocateMessageQueueStrategy inner = new AllocateMessageQueueAveragely();
        private final List ids;

        OfEnvironment(List ids) {
            this.ids = ids;
        }

        public List allocate(String group, String member, List queues, List members) {
            List own = new ArrayList();
            for (Iterator all = queues.iterator(); all.hasNext();) {
                MessageQueue queue = (MessageQueue) all.next();
                if (queue.getTopic().startsWith("%RETRY%") || ids.contains(String.valueOf(queue.getQueueId()))) {
                    own.add(queue);
                }
            }
            return inner.allocate(group, member, own, members);
        }

        public String getName() {
            return "env-based";
        }
    }

    /** Whether the listener fails with a message: with all, with none, or by the number between the colons of its body. */
    private boolean fails(List messages) {
        if (!"some".equals(fail)) {
            return "true".equals(fail);
        }
        MessageExt message = (MessageExt) messages.get(0);
        String text = new String(message.getBody(), java.nio.charset.StandardCharsets.UTF_8);
        int number = Integer.parseInt(text.split(":")[1]);
        return number % 20 == 1 || (number % 3 == 0 && message.getReconsumeTimes() < 2);
    }

    private void answer(List messages) {
        for (Iterator all = messages.iterator(); replier != null && all.hasNext();) {
            MessageExt message = (MessageExt) all.next();
            try {
                byte[] body = ("java:" + new String(message.getBody(), java.nio.charset.StandardCharsets.UTF_8)).getBytes();
                Message reply = MessageUtil.createReplyMessage(message, body);
                reply.putUserProperty("by", "java");
                replier.send(reply, 3000);
            } catch (Exception e) {
                throw new RuntimeException(e);
            }
        }
    }

    private void note(List messages) {
        for (Iterator all = messages.iterator(); all.hasNext();) {
            MessageExt message = (MessageExt) all.next();
            Map line = new LinkedHashMap();
            line.put("at", Long.valueOf(System.currentTimeMillis()));
            line.put("group", group);
            line.put("id", message.getMsgId());
            line.put("broker", message.getBrokerName());
            line.put("queue", Integer.valueOf(message.getQueueId()));
            line.put("offset", Long.valueOf(message.getQueueOffset()));
            line.put("times", Integer.valueOf(message.getReconsumeTimes()));
            line.put("body", new String(message.getBody(), java.nio.charset.StandardCharsets.UTF_8));
            String text = JSON.toJSONString(line);
            synchronized (OUT) {
                OUT.println(text);
            }
        }
    }

    /** The client takes what implements both kinds for orderly: so each is a class. */
    private class Concurrently implements MessageListenerConcurrently {
        public ConsumeConcurrentlyStatus consumeMessage(List messages, ConsumeConcurrentlyContext context) {
            note(messages);
            answer(messages);
            return fails(messages) ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        }
    }

    private class Orderly implements MessageListenerOrderly {
        public ConsumeOrderlyStatus consumeMessage(List messages, ConsumeOrderlyContext context) {
            note(messages);
            return fails(messages) ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        }
    }
}
