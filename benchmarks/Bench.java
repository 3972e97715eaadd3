import java.util.ArrayList;
import java.util.BitSet;
import java.util.Collection;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's own Java client, timed. Written for Janino: no lambdas, no inferred type arguments. */
public class Bench {
    /** A client that failed leaves threads behind that would keep the JVM alive and silent. */
    public static void main(String[] args) {
        try {
            bench(args);
            System.exit(0);
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);
        }
    }

    static void bench(String[] args) throws Exception {
        String mode = args[0];
        String nameServer = args[1];
        String topic = args[2];
        long count = Long.parseLong(args[3]);
        // Passes that do not count warm the JVM up, as Spark's is; a producer's go to a topic of its own.
        long started = System.nanoTime();
        for (boolean counts = false; ; ) {
            boolean writes = mode.equals("batch") || mode.equals("auto");
            String to = counts || !writes ? topic : args[args.length - 1];
            long messages = counts || !writes ? count : Math.min(count, 200000);
            if (counts) {
                System.out.println("begin");
                System.out.flush();
                cpu = cpuNanos();
            }
            if (mode.equals("lite")) {
                lite(nameServer, to, messages, Integer.parseInt(args[4]), Integer.parseInt(args[5]), counts);
            } else if (mode.equals("push")) {
                push(nameServer, to, messages, counts);
            } else if (mode.equals("deliver")) {
                deliver(nameServer, to, (int) messages, counts);
            } else if (mode.equals("pull")) {
                pull(nameServer, to, messages, Integer.parseInt(args[4]), Integer.parseInt(args[5]), counts);
            } else if (mode.equals("batch")) {
                batch(nameServer, to, messages, Integer.parseInt(args[4]), Integer.parseInt(args[5]), Integer.parseInt(args[6]), counts);
            } else {
                auto(nameServer, to, messages, Integer.parseInt(args[4]), counts);
            }
            if (counts) {
                break;
            }
            counts = System.nanoTime() - started > Long.getLong("warmUpMs") * 1000000L;
        }
    }

    static long cpu;

    static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    static void print(long messages, long distinct, long nanos, boolean counts) {
        double used = (cpuNanos() - cpu) / 1e9;
        if (counts) {
            System.out.println("{\"messages\":" + messages + ",\"distinct\":" + distinct + ",\"seconds\":" + nanos / 1e9 + ",\"cpu\":" + used + "}");
        }
    }

    /** Which offsets of each queue were seen: a reader that reads a message twice is fast and wrong. */
    static final class Seen {
        final BitSet[] byQueue = new BitSet[64];
        long messages;
        volatile long distinct;
        long bytes;

        synchronized void take(List messages) {
            for (int i = 0; i < messages.size(); i++) {
                MessageExt m = (MessageExt) messages.get(i);
                if (byQueue[m.getQueueId()] == null) {
                    byQueue[m.getQueueId()] = new BitSet();
                }
                if (!byQueue[m.getQueueId()].get((int) m.getQueueOffset())) {
                    byQueue[m.getQueueId()].set((int) m.getQueueOffset());
                    distinct++;
                }
                // All that a user would touch, as the Spark source does.
                bytes += m.getBody().length + m.getProperties().size();
                this.messages++;
            }
        }
    }

    static void lite(String nameServer, String topic, long count, int batchSize, int threads, boolean counts) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("bench_" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        consumer.setAutoCommit(false);
        consumer.setPullBatchSize(batchSize);
        consumer.setPullThreadNums(threads);
        // Not by seekToBegin: it interrupts pulls that are under way, which closes the connection now and then.
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        Collection queues = consumer.fetchMessageQueues(topic);
        long begin = System.nanoTime();
        consumer.assign(queues);
        Seen seen = new Seen();
        long last = System.nanoTime();
        while (seen.distinct < count && System.nanoTime() - last < 20000000000L) {
            List messages = consumer.poll(100);
            if (!messages.isEmpty()) {
                seen.take(messages);
                last = System.nanoTime();
            }
        }
        print(seen.messages, seen.distinct, System.nanoTime() - begin, counts);
        consumer.shutdown();
    }

    static void push(String nameServer, String topic, final long count, boolean counts) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench_" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("bench_" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        final AtomicLong seen = new AtomicLong();
        final CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener(new MessageListenerConcurrently() {
            public ConsumeConcurrentlyStatus consumeMessage(List messages, ConsumeConcurrentlyContext context) {
                if (seen.addAndGet(messages.size()) >= count) {
                    done.countDown();
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
        });
        long begin = System.nanoTime();
        consumer.start();
        done.await(120, TimeUnit.SECONDS);
        long nanos = System.nanoTime() - begin;
        print(seen.get(), seen.get(), nanos, counts);
        consumer.shutdown();
    }

    /** Bodies are times of System.nanoTime's clock; how late each is with the listener. */
    static void deliver(String nameServer, String topic, final int count, boolean counts) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench_" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("bench_" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.subscribe(topic, "*");
        final long[] late = new long[count];
        final AtomicInteger seen = new AtomicInteger();
        final CountDownLatch done = new CountDownLatch(1);
        final long settled = System.nanoTime() + SETTLING_MS * 1000000L;
        consumer.registerMessageListener(new MessageListenerConcurrently() {
            public ConsumeConcurrentlyStatus consumeMessage(List messages, ConsumeConcurrentlyContext context) {
                long now = System.nanoTime();
                for (int i = 0; i < messages.size(); i++) {
                    long sent = Long.parseLong(new String(((MessageExt) messages.get(i)).getBody()));
                    if (sent < settled) {
                        continue;
                    }
                    int at = seen.getAndIncrement();
                    if (at < count) {
                        late[at] = now - sent;
                    }
                    if (at == count - 1) {
                        done.countDown();
                    }
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
        });
        long begin = System.nanoTime();
        consumer.start();
        boolean all = done.await(120, TimeUnit.SECONDS);
        long nanos = System.nanoTime() - begin;
        java.util.Arrays.sort(late);
        if (counts && all) {
            System.out.println("{\"messages\":" + count + ",\"distinct\":" + count + ",\"seconds\":" + nanos / 1e9 + ",\"cpu\":0,\"p50\":"
                + late[count / 2] / 1e6 + ",\"p99\":" + late[count * 99 / 100] / 1e6 + "}");
        }
        consumer.shutdown();
    }

    // A new member gets its queues, and what lay in them, first.
    static final int SETTLING_MS = 2000;

    static void pull(final String nameServer, final String topic, final long count, final int maxNums, final int threads, boolean counts) throws Exception {
        final DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("bench_" + System.nanoTime());
        consumer.setNamesrvAddr(nameServer);
        consumer.start();
        final List all = new ArrayList(consumer.fetchSubscribeMessageQueues(topic));
        final AtomicInteger next = new AtomicInteger();
        final Seen total = new Seen();
        final AtomicReference failure = new AtomicReference();
        final CountDownLatch done = new CountDownLatch(threads);
        long begin = System.nanoTime();
        for (int t = 0; t < threads; t++) {
            new Thread() {
                public void run() {
                    try {
                        for (int i = next.getAndIncrement(); i < all.size(); i = next.getAndIncrement()) {
                            MessageQueue queue = (MessageQueue) all.get(i);
                            long end = consumer.maxOffset(queue);
                            long at = consumer.minOffset(queue);
                            while (at < end && total.distinct < count) {
                                PullResult result = consumer.pull(queue, "*", at, maxNums);
                                if (result.getMsgFoundList() != null) {
                                    total.take(result.getMsgFoundList());
                                }
                                at = result.getNextBeginOffset();
                            }
                        }
                    } catch (Throwable e) {
                        failure.set(e);
                    } finally {
                        done.countDown();
                    }
                }
            }.start();
        }
        done.await();
        if (failure.get() != null) {
            throw new RuntimeException((Throwable) failure.get());
        }
        print(total.messages, total.distinct, System.nanoTime() - begin, counts);
        consumer.shutdown();
    }

    static byte[] body(int size) {
        byte[] bytes = new byte[size];
        ThreadLocalRandom.current().nextBytes(bytes);
        return bytes;
    }

    static Message message(String topic, byte[] body, long i) {
        Message m = new Message(topic, "tag" + i % 4, "key-" + i, body);
        m.putUserProperty("region", "eu-west");
        m.putUserProperty("amount", Long.toString(i));
        return m;
    }

    static DefaultMQProducer producer(String nameServer) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench_" + System.nanoTime());
        producer.setNamesrvAddr(nameServer);
        // Producers of one instance name share an accumulator, and the first that shuts down ends it.
        producer.setInstanceName("bench_" + System.nanoTime());
        producer.setSendMsgTimeout(60000);
        producer.setRetryTimesWhenSendFailed(20);
        producer.setMaxMessageSize(4 * 1024 * 1024);
        return producer;
    }

    static void batch(String nameServer, final String topic, final long count, final int size, final int batchBytes, final int threads, boolean counts) throws Exception {
        final DefaultMQProducer producer = producer(nameServer);
        producer.start();
        final List queues = producer.fetchPublishMessageQueues(topic);
        final AtomicLong sent = new AtomicLong();
        final AtomicInteger turn = new AtomicInteger();
        final AtomicReference failure = new AtomicReference();
        final CountDownLatch done = new CountDownLatch(threads);
        final int perBatch = Math.max(1, batchBytes / (size + 150));
        long begin = System.nanoTime();
        for (int t = 0; t < threads; t++) {
            final long share = count / threads + (t < count % threads ? 1 : 0);
            new Thread() {
                public void run() {
                    try {
                        byte[] body = body(size);
                        long mine = 0;
                        while (mine < share) {
                            List batch = new ArrayList();
                            for (int i = 0; i < perBatch && mine < share; i++, mine++) {
                                batch.add(message(topic, body, mine));
                            }
                            MessageQueue queue = (MessageQueue) queues.get(turn.getAndIncrement() % queues.size());
                            send(producer, batch, queue);
                            sent.addAndGet(batch.size());
                        }
                    } catch (Throwable e) {
                        failure.set(e);
                    } finally {
                        done.countDown();
                    }
                }
            }.start();
        }
        done.await();
        if (failure.get() != null) {
            throw new RuntimeException((Throwable) failure.get());
        }
        print(sent.get(), sent.get(), System.nanoTime() - begin, counts);
        producer.shutdown();
    }

    /** A busy broker says so, and did not store the batch: ask again, as our sink does. */
    static void send(DefaultMQProducer producer, List batch, MessageQueue queue) throws Exception {
        for (int attempt = 0;; attempt++) {
            try {
                SendResult result = producer.send((Collection) batch, queue);
                if (result.getSendStatus() != SendStatus.SEND_OK) {
                    throw new RuntimeException(result.toString());
                }
                return;
            } catch (org.apache.rocketmq.client.exception.MQBrokerException e) {
                if (e.getResponseCode() != 2 || attempt > 200) {
                    throw e;
                }
                Thread.sleep(20);
            }
        }
    }

    static void auto(String nameServer, String topic, long count, int size, boolean counts) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        producer.setAutoBatch(true);
        producer.start();
        final AtomicLong sent = new AtomicLong();
        final AtomicReference failure = new AtomicReference();
        byte[] body = body(size);
        long begin = System.nanoTime();
        for (long i = 0; i < count && failure.get() == null; i++) {
            while (i - sent.get() > 10000) {
                Thread.sleep(1);
            }
            producer.send(message(topic, body, i), new SendCallback() {
                public void onSuccess(SendResult result) {
                    sent.incrementAndGet();
                }

                public void onException(Throwable e) {
                    failure.set(e);
                }
            });
        }
        while (sent.get() < count && failure.get() == null) {
            Thread.sleep(1);
        }
        if (failure.get() != null) {
            throw new RuntimeException((Throwable) failure.get());
        }
        print(sent.get(), sent.get(), System.nanoTime() - begin, counts);
        producer.shutdown();
    }
}
