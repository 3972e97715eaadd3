import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's own transactional producer of a group: sends count=N half messages, "yes" and "no" with a number in turn, which it
 * does not decide, and prints one JSON object for each that a broker asks it about. It commits those that begin with yes. It
 * ends when its standard input does.
 */
public class Halves implements TransactionListener {
    private static final PrintStream OUT = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true);

    public static void main(String[] arguments) throws Exception {
        Map options = Send.options(arguments);
        TransactionMQProducer producer = new TransactionMQProducer((String) options.get("group"));
        producer.setInstanceName(Send.instance());
        producer.setNamesrvAddr((String) options.get("nameServer"));
        producer.setTransactionListener(new Halves());
        producer.start();
        int count = Integer.parseInt((String) options.get("count"));
        for (int i = 0; i < count; i++) {
            String body = (i % 2 == 0 ? "yes java " : "no java ") + i;
            producer.sendMessageInTransaction(new Message((String) options.get("topic"), body.getBytes("UTF-8")), null);
        }
        say("sent", Integer.valueOf(count));
        while (System.in.read() >= 0) {
        }
        producer.shutdown();
        System.exit(0);
    }

    public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
        return LocalTransactionState.UNKNOW;
    }

    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        String body = new String(message.getBody());
        say("asked", body);
        return body.startsWith("yes") ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    private static void say(String name, Object value) {
        Map line = new LinkedHashMap();
        line.put(name, value);
        OUT.println(JSON.toJSONString(line));
    }
}
