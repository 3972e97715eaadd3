import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Arrays;

/** Runs another class; one that fails ends the JVM, which the threads of a client that was started would keep alive. */
public class Main {
    public static void main(String[] arguments) throws Exception {
        try {
            Method run = Class.forName(arguments[0]).getMethod("main", new Class[] {String[].class});
            run.invoke(null, new Object[] {Arrays.copyOfRange(arguments, 1, arguments.length)});
        } catch (InvocationTargetException e) {
            e.getCause().printStackTrace();
            System.exit(1);
        }
    }
}
