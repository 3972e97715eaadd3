import java.util.Arrays;
import java.util.ServiceLoader;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BiConsumer;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;

/** RocketMQ's own Java client for gRPC, timed. Written for Janino: no lambdas, no inferred type arguments. */
public class GrpcBench {
    /** So many sends may be without an answer; the pass that counts takes the number that was fastest before. */
    static final int[] BOUNDS = {64, 256, 1024, 4096};
    static final int WARM = 10000;

    /** A client that failed leaves threads behind that would keep the JVM alive and silent. */
    public static void main(String[] args) {
        try {
            bench(args[0], args[1], args[2], Integer.parseInt(args[3]), Integer.parseInt(args[4]), args[5]);
            System.exit(0);
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);
        }
    }

    static void bench(String mode, String endpoint, String topic, int count, int size, String warm) throws Exception {
        ClientServiceProvider provider = (ClientServiceProvider) ServiceLoader.load(ClientServiceProvider.class).iterator().next();
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(endpoint).enableSsl(false)
            .setRequestTimeout(java.time.Duration.ofSeconds(30)).build();
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration)
            .setTopics(new String[] {topic, warm}).setMaxAttempts(20).build();
        byte[] body = new byte[size];
        ThreadLocalRandom.current().nextBytes(body);
        if (mode.equals("grpc-async")) {
            async(provider, producer, topic, count, body, warm);
        } else {
            sync(provider, producer, topic, count, body, warm);
        }
        producer.close();
    }

    static void async(ClientServiceProvider provider, Producer producer, String topic, int count, byte[] body, String warm) throws Exception {
        long warmed = System.nanoTime() + Long.getLong("warmUpMs") * 1000000L;
        long[] best = new long[BOUNDS.length];
        do {
            for (int i = 0; i < BOUNDS.length; i++) {
                int messages = Math.min(count, WARM);
                best[i] = pass(provider, producer, warm, messages, body, BOUNDS[i]);
            }
        } while (System.nanoTime() < warmed);
        int fastest = 0;
        for (int i = 1; i < BOUNDS.length; i++) {
            fastest = best[i] < best[fastest] ? i : fastest;
        }
        begin();
        long nanos = pass(provider, producer, topic, count, body, BOUNDS[fastest]);
        end(count, nanos, ",\"in_flight\":" + BOUNDS[fastest]);
    }

    static long pass(ClientServiceProvider provider, Producer producer, String topic, int count, byte[] body, int bound) throws Exception {
        final Semaphore free = new Semaphore(bound);
        final AtomicReference failure = new AtomicReference();
        long begin = System.nanoTime();
        for (int i = 0; i < count && failure.get() == null; i++) {
            free.acquire();
            CompletableFuture sent = producer.sendAsync(message(provider, topic, body, i));
            sent.whenComplete(new BiConsumer() {
                public void accept(Object receipt, Object error) {
                    if (error != null) {
                        failure.set(error);
                    }
                    free.release();
                }
            });
        }
        if (!free.tryAcquire(bound, 120, TimeUnit.SECONDS)) {
            throw new RuntimeException("not all messages were acknowledged in time");
        }
        if (failure.get() != null) {
            throw new RuntimeException((Throwable) failure.get());
        }
        return System.nanoTime() - begin;
    }

    /** One send after the other, and how long each takes. */
    static void sync(ClientServiceProvider provider, Producer producer, String topic, int count, byte[] body, String warm) throws Exception {
        long warmed = System.nanoTime() + Long.getLong("warmUpMs") * 1000000L;
        do {
            producer.send(message(provider, warm, body, 0));
        } while (System.nanoTime() < warmed);
        long[] took = new long[count];
        begin();
        long begin = System.nanoTime();
        for (int i = 0; i < count; i++) {
            long sent = System.nanoTime();
            producer.send(message(provider, topic, body, i));
            took[i] = System.nanoTime() - sent;
        }
        long nanos = System.nanoTime() - begin;
        Arrays.sort(took);
        end(count, nanos, ",\"p50\":" + took[count / 2] / 1e6 + ",\"p99\":" + took[count * 99 / 100] / 1e6);
    }

    static Message message(ClientServiceProvider provider, String topic, byte[] body, int i) {
        return provider.newMessageBuilder().setTopic(topic).setBody(body).setTag("tag" + i % 4)
            .setKeys(new String[] {"key-" + i}).addProperty("region", "eu-west").addProperty("amount", Integer.toString(i)).build();
    }

    static long cpu;

    static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    static void begin() {
        System.out.println("begin");
        System.out.flush();
        cpu = cpuNanos();
    }

    static void end(int messages, long nanos, String more) {
        double used = (cpuNanos() - cpu) / 1e9;
        System.out.println("{\"messages\":" + messages + ",\"seconds\":" + nanos / 1e9 + ",\"cpu\":" + used + more + "}");
    }
}
