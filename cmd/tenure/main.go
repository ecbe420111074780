//go:build unix

// Tenure runs a program in one place at a time, using a lease in Postgres, NATS, etcd, Kubernetes
// or a SQLite file, and shows and moves such leases. docs/command.md says what it guarantees on
// which operating system.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/tenurelib/tenure/internal/objects"
)

const overview = `Tenure runs a program in one place at a time, using a lease in Postgres, NATS JetStream,
etcd, Kubernetes or a SQLite file.

Usage:

  tenure COMMAND [flags]

Commands:

%s
Try it in two terminals, and press Ctrl-C in the one where the program runs:

  tenure run -store /tmp/try.db -key web -replica a -- sh -c 'echo I run; exec sleep 1000'
  tenure run -store /tmp/try.db -key web -replica b -- sh -c 'echo I run; exec sleep 1000'

Stores:

  /var/lib/web.db                                       a SQLite file, for the processes of one host
  postgres://user:password@host/db
  nats://host,host/?replicas=3&sync=always&creds=FILE   or user:password@ or nkey=FILE; stream=NAME; with
                                                        TLS: ca=FILE, cert=FILE and key=FILE, tls=required
  etcd://user:password@host,host/prefix                 etcds: with TLS: ca=FILE, cert=FILE and key=FILE
  kube://NAMESPACE                                      Lease objects, with the pod's service account or the
                                                        kubeconfig's current context; server=URL of a proxy;
                                                        lease=TYPE/ID=NAME for a Lease of another name

Environment:

  TENURE_STORE       the store, if -store is not given
  TENURE_REPLICA_ID  the name of this replica, if -replica is not given

The exit status is 0 on success, 1 if the command failed, and 2 if the command line is
invalid. "tenure run -once" exits with the program's status. "tenure status" exits with 3
if no replica holds the lease, and with 4 if the store knows nothing of it; "tenure owner"
does the same for a key. "tenure doctor" exits with 3 if something should be changed, and with 4 if
the store can't be used as it is.

"tenure COMMAND -h" explains a command.
`

// command is a subcommand, selected by the first argument.
type command struct {
	name     string
	synopsis string            // what follows the name in the usage line
	summary  string            // its line in the overview; empty hides an internal command
	about    string            // the text at the top of its help
	flags    string            // their names
	usages   map[string]string // of flags that mean something else here than with other commands
	takes    bool              // it takes arguments, such as a program and its arguments; otherwise there are none

	check func(o *options) error // whether the flags fit each other; may be nil
	act   func(ctx context.Context, o *options, out *output, args []string) error
}

// output is where a command writes.
type output struct {
	stdout, stderr io.Writer
}

// commands returns the commands, in the order of the help.
func commands() []command {
	return []command{
		runCommand, witnessCommand, statusCommand, listCommand, ownerCommand, watchCommand, resignCommand, handoverCommand, drainCommand, undrainCommand,
		migrateCommand, doctorCommand, ddlCommand, unitCommand, completionCommand(), manCommand(), versionCommand, guardCommand, adoptedCommand,
	}
}

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run runs a command line and returns its exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	out := &output{stdout: stdout, stderr: plainText{stderr}}
	if len(args) == 0 {
		printOverview(stderr)
		return 2
	}
	name, args := args[0], args[1:]
	switch name {
	case "-version", "--version":
		name = versionCommand.name
	case "-h", "-help", "--help":
		printOverview(stdout)
		return 0
	case "help":
		if len(args) == 0 {
			printOverview(stdout)
			return 0
		}
		name, args = args[0], []string{"-h"}
	}
	for _, c := range commands() {
		if c.name == name {
			return out.exit(c.name, c.run(ctx, out, args))
		}
	}
	if strings.HasPrefix(name, "-") {
		return out.exit("", usageError(`the command comes first, as in "tenure status -store STORE"; "tenure -h" lists the commands`))
	}
	return out.exit("", usageError(`there is no command %s; "tenure -h" lists them`, quoted(name)))
}

// run parses the flags and runs the command.
func (c command) run(ctx context.Context, out *output, args []string) error {
	o := &options{line: args, given: make(map[string]bool)}
	flags := o.flagSet(c)
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		c.printHelp(out.stdout, flags)
		return nil
	}
	if err != nil {
		return usageError(`%s; "tenure %s -h" lists the flags`, hideQuoted(err.Error()), c.name)
	}
	flags.Visit(func(f *flag.Flag) { o.given[f.Name] = true })
	args = flags.Args()
	o.store.given = o.given["store"]
	if err := o.store.hideURL(len(args)); err != nil {
		fmt.Fprintln(out.stderr, err)
	}
	if len(args) > 0 && !c.takes {
		return usageError("unexpected argument %s", quoted(args[0]))
	}
	if c.check != nil {
		if err := c.check(o); err != nil {
			return err
		}
	}
	err = c.act(ctx, o, out, args)
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) {
		return fmt.Errorf("%w: run \"tenure migrate%s\"", missing.Cause, givenAgain(flags, "table", "schema"))
	}
	return err
}

// givenAgain returns the flags that were given, quoted for a shell.
func givenAgain(flags *flag.FlagSet, names ...string) string {
	var again strings.Builder
	for _, name := range names {
		if f := flags.Lookup(name); f != nil && f.Value.String() != "" {
			fmt.Fprintf(&again, " -%s '%s'", name, strings.ReplaceAll(f.Value.String(), "'", `'\''`))
		}
	}
	return again.String()
}

func printOverview(w io.Writer) { io.WriteString(w, overviewText()) }

func overviewText() string {
	var list strings.Builder
	table := tabwriter.NewWriter(&list, 0, 0, 2, ' ', 0)
	for _, c := range commands() {
		if c.summary != "" {
			fmt.Fprintf(table, "  %s\t%s\n", c.name, c.summary)
		}
	}
	table.Flush()
	return fmt.Sprintf(overview, list.String())
}

func (c command) printHelp(w io.Writer, flags *flag.FlagSet) {
	fmt.Fprintf(w, "Usage: tenure %s %s\n\n%s\n", c.name, c.synopsis, strings.TrimSpace(c.about))
	if c.flags == "" {
		return
	}
	fmt.Fprint(w, "\nFlags:\n\n")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	flags.VisitAll(func(f *flag.Flag) {
		value, usage := explainFlag(f)
		for i, line := range strings.Split(usage, "\n") {
			if i == 0 {
				fmt.Fprintf(table, "  -%s %s\t%s\n", f.Name, value, line)
			} else {
				fmt.Fprintf(table, "  \t%s\n", line)
			}
		}
	})
	table.Flush()
}

// explainFlag returns the name of a flag's value, which is empty for a switch, and its usage with its default.
func explainFlag(f *flag.Flag) (value, usage string) {
	value, usage = flag.UnquoteUsage(f)
	if f.DefValue != "" && f.DefValue != "0" && f.DefValue != "0s" && f.DefValue != "false" {
		usage += fmt.Sprintf(" (default %s)", f.DefValue)
	}
	return value, usage
}

// durationVar defines a flag for a duration. It is the flag package's own, but for the
// error about a number without a unit.
func durationVar(flags *flag.FlagSet, d *time.Duration, name string, value time.Duration, usage string) {
	*d = value
	flags.Var((*durationValue)(d), name, usage)
}

type durationValue time.Duration

func (d *durationValue) String() string { return time.Duration(*d).String() }

func (d *durationValue) Set(s string) error {
	parsed, err := time.ParseDuration(s)
	if err != nil {
		example := "30s"
		if _, err := time.ParseDuration(s + "s"); err == nil {
			example = s + "s"
		}
		return fmt.Errorf("want a duration such as %s", example)
	}
	if parsed > 0 && parsed < objects.ShortestDuration {
		return fmt.Errorf("want at least %v", objects.ShortestDuration)
	}
	*d = durationValue(parsed)
	return nil
}

// usageError returns an error that says why the command line is invalid.
func usageError(format string, args ...any) error {
	return errUsage{fmt.Errorf(format, args...)}
}

// quoted returns an argument for an error, unless it may be a mistyped URL with a password.
func quoted(arg string) string {
	if !harmless.MatchString(arg) {
		return "(not shown)"
	}
	return strconv.Quote(arg)
}

var (
	harmless = regexp.MustCompile(`^[A-Za-z0-9._+-]*$`)
	inQuotes = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	notAFlag = regexp.MustCompile(`(?s)^(flag provided but not defined: -|bad flag syntax: )(.*)`)
)

// hideQuoted is quoted for the arguments in an error of package flag.
func hideQuoted(text string) string {
	if m := notAFlag.FindStringSubmatch(text); m != nil && !harmless.MatchString(m[2]) {
		return m[1] + "(not shown)"
	}
	return inQuotes.ReplaceAllStringFunc(text, func(in string) string {
		if arg, err := strconv.Unquote(in); err == nil {
			return quoted(arg)
		}
		return "(not shown)"
	})
}

type errUsage struct{ error }

func (e errUsage) Unwrap() error { return e.error }

// exitStatus is the error of a command that exits with a status of its own, for example
// that of the program it ran, and prints nothing.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// exit reports an error and returns the exit status for it.
func (o *output) exit(name string, err error) int {
	if err == nil {
		return 0
	}
	if status := exitStatus(0); errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(o.stderr, "%s: %s\n", strings.TrimSpace("tenure "+name), packageName.ReplaceAllString(oneLine(err), ""))
	if usage := (errUsage{}); errors.As(err, &usage) {
		return 2
	}
	return 1
}

var packageName = regexp.MustCompile(`^(nats|etcd|kube)?tenure: `)

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// plainText replaces control characters, because an error may quote what others have written to the store.
type plainText struct{ w io.Writer }

func (p plainText) Write(b []byte) (int, error) {
	safe := bytes.Map(func(r rune) rune {
		if r != '\n' && unprintable(r) {
			return unicode.ReplacementChar
		}
		return r
	}, b)
	if _, err := p.w.Write(safe); err != nil {
		return 0, err
	}
	return len(b), nil
}
