import com.alibaba.fastjson.JSON;
import java.io.PrintStream;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** RocketMQ's own tool, mqadmin: arguments are a JSON array of what stands on its command line. */
public class Tool extends MQAdminStartup {
    public static void run(Map options, PrintStream out) throws Exception {
        List given = JSON.parseArray((String) options.get("arguments"));
        String[] arguments = new String[given.size()];
        for (int i = 0; i < arguments.length; i++) {
            arguments[i] = (String) given.get(i);
        }
        PrintStream stdout = System.out;
        PrintStream stderr = System.err;
        System.setOut(out);
        System.setErr(out);
        // Commands are made anew by each call; one that was used keeps a client that has been shut down.
        SUB_COMMANDS.clear();
        try {
            MQAdminStartup.main(arguments);
        } finally {
            System.setOut(stdout);
            System.setErr(stderr);
        }
    }
}
