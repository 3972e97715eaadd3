import com.alibaba.fastjson.JSON;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * Runs the other classes. With the name of one it runs its main method; one that fails ends the JVM, which the threads of a
 * client that was started would keep alive. Without a name it serves calls until its standard input ends: a line is
 * {"call": class, "options": {...}}, the answer what the method run of that class printed, then one line with "##", and the
 * stack if it failed. What RocketMQ itself prints goes to standard error.
 */
public class Main {
    public static void main(String[] arguments) throws Exception {
        if (arguments.length == 0) {
            serve();
            System.exit(0);
        }
        try {
            Method run = Class.forName(arguments[0]).getMethod("main", new Class[] {String[].class});
            run.invoke(null, new Object[] {Arrays.copyOfRange(arguments, 1, arguments.length)});
        } catch (InvocationTargetException e) {
            e.getCause().printStackTrace();
            System.exit(1);
        }
    }

    private static void serve() throws Exception {
        PrintStream answers = new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8");
        System.setOut(System.err);
        BufferedReader calls = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        for (String line = calls.readLine(); line != null; line = calls.readLine()) {
            Map call = JSON.parseObject(line);
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            PrintStream out = new PrintStream(printed, false, "UTF-8");
            String failure = null;
            try {
                Method run = Class.forName((String) call.get("call")).getMethod("run", new Class[] {Map.class, PrintStream.class});
                run.invoke(null, new Object[] {call.get("options"), out});
            } catch (InvocationTargetException e) {
                StringWriter stack = new StringWriter();
                e.getCause().printStackTrace(new PrintWriter(stack, true));
                failure = stack.toString();
            }
            out.flush();
            printed.writeTo(answers);
            Map end = new LinkedHashMap();
            end.put("failure", failure);
            answers.println();
            answers.println("##" + JSON.toJSONString(end));
            answers.flush();
        }
    }
}
