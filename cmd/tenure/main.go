//go:build unix

// Tenure runs a program in one place at a time, using a lease in Postgres, MySQL, NATS, etcd, Kubernetes
// or a SQLite file, and shows and moves such leases. docs/command.md says what it guarantees on
// which operating system.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tenurelib/tenure/internal/objects"
)

// Blocks are indented by four characters, so that the manual page keeps their lines.
const overview = `Tenure runs a program in one place at a time, using a lease in Postgres, MySQL, MariaDB,
NATS JetStream, etcd, Kubernetes or a SQLite file.

Stores:

    /var/lib/web.db                                       a SQLite file, for the processes of one host
    postgres://user:password@host/db
    mysql://user:password@host/db                         or MariaDB; with TLS: tls=true, ca=FILE, cert=FILE and key=FILE
    nats://host,host/?replicas=3&sync=always&creds=FILE   or user:password@ or nkey=FILE; stream=NAME; with
                                                          TLS: ca=FILE, cert=FILE and key=FILE, tls=required
    etcd://user:password@host,host/prefix                 etcds: with TLS: ca=FILE, cert=FILE and key=FILE
    kube://NAMESPACE                                      Lease objects, with the pod's service account or the
                                                          kubeconfig's current context; server=URL of a proxy;
                                                          lease=TYPE/ID=NAME for a Lease of another name

Environment:

    TENURE_STORE       the store, if --store is not given
    TENURE_SCHEMA      the schema of the table on Postgres, if --schema is not given
    TENURE_REPLICA_ID  the name of this replica, if --replica is not given

The exit status is 0 on success, 1 if the command failed, and 2 if the command line is
invalid. Others are explained by the help of run, status, owner and doctor.

Try it in two terminals, and press Ctrl-C in the one where the program runs:

    tenure run --store /tmp/try.db --key web --replica a -- sh -c 'echo I run; exec sleep 1000'
    tenure run --store /tmp/try.db --key web --replica b -- sh -c 'echo I run; exec sleep 1000'`

// output is where a command writes.
type output struct {
	stdout, stderr io.Writer
}

// newRoot returns the command that has all others. Each is made by a func that says its flags, its help, and what it does.
func newRoot(out *output) *cobra.Command {
	info, _ := debug.ReadBuildInfo()
	root := &cobra.Command{
		Use:     "tenure COMMAND",
		Short:   "run a program in one place at a time",
		Long:    overview,
		Version: newVersionView(info).String(),

		SilenceErrors: true, SilenceUsage: true, SuggestionsMinimumDistance: 2,
		PersistentPreRunE: func(c *cobra.Command, args []string) error {
			if err := hideURL(c.Flags(), len(args)); err != nil {
				fmt.Fprintln(out.stderr, err)
			}
			if err := c.ValidateFlagGroups(); err != nil {
				return errUsage{err}
			}
			return checkNumbers(c.Flags())
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 110"))
	root.SetFlagErrorFunc(flagError)
	root.SetOut(out.stdout)
	root.SetErr(out.stderr)
	root.AddCommand(
		runCommand(out), witnessCommand(out), statusCommand(out), listCommand(out), ownerCommand(out), watchCommand(out), resignCommand(out),
		handoverCommand(out), drainCommand(out), undrainCommand(out), migrateCommand(out), doctorCommand(out), ddlCommand(out), unitCommand(out),
		manCommand(out), versionCommand(out), guardCommand(out), adoptedCommand(out),
	)
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		c.Flags().SetInterspersed(false) // what follows the first argument is the program's
		c.Flags().SortFlags = false
		if c.Args == nil {
			c.Args = noArguments
		}
		for _, shell := range c.Commands() { // of completion
			shell.Args = noArguments
		}
	}
	return root
}

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run runs a command line and returns its exit status. It changes the arguments as twoDashes says.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	out := &output{stdout: stdout, stderr: plainText{stderr}}
	root := newRoot(out)
	switch {
	case len(args) == 0 || args[0] == "" || args[0] == "--":
		root.SetOut(stderr)
		root.SetArgs([]string{"-h"})
		root.Execute()
		return 2
	case args[0] == "help": // cobra's own would quote an unknown command
		args = append(args[1:len(args):len(args)], "-h")
	}
	if name := twoDashes(root, args); name != "" {
		fmt.Fprintf(out.stderr, "tenure: -%[1]s is read as --%[1]s: flags have two dashes\n", name)
	}
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if err != nil && c == root && !errors.As(err, new(errUsage)) {
		err = usageError(`there is no command %s%s; "tenure -h" lists them`, quoted(args[0]), didYouMean(root, args[0], ""))
	}
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) {
		err = fmt.Errorf("%w: run \"tenure migrate%s\"", missing.Cause, givenAgain(c.Flags(), "table", "schema"))
	}
	return out.exit(c.CommandPath(), err)
}

// twoDashes gives flags with one dash, as they were before 1.0, a second one, and returns the name of the first such flag that
// exists. It leaves alone the values of flags, and all from the program on.
func twoDashes(root *cobra.Command, args []string) (first string) {
	flags := root.Flags()
	if c, _, err := root.Find(args[:1]); err == nil && c != root {
		flags, args = c.Flags(), args[1:]
	} else if strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) && len(args) > 1 {
		twoDashes(root, args[1:])
		return ""
	}
	for i := 0; i < len(args) && len(args[i]) > 1 && args[i][0] == '-' && args[i] != "--"; i++ {
		name, _, hasValue := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		f := flags.Lookup(name)
		if args[i][1] != '-' && len(args[i]) > 2 {
			args[i] = "-" + args[i]
			if f != nil {
				first = cmp.Or(first, name)
			}
		}
		if f != nil && f.NoOptDefVal == "" && !hasValue {
			i++
		}
	}
	return first
}

// flagError says what is wrong with a flag. It quotes no value, which may be a mistyped URL with a password.
func flagError(c *cobra.Command, err error) error {
	text := "a flag has no name"
	switch err := err.(type) {
	case *pflag.NotExistError:
		name := cmp.Or(err.GetSpecifiedShortnames(), err.GetSpecifiedName())
		flags := &cobra.Command{SuggestionsMinimumDistance: 2}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			flags.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
		})
		text = "there is no flag " + quoted("--"+name) + didYouMean(flags, name, "--")
		if !c.HasParent() {
			text += `; the command comes first, as in "tenure status --store STORE"`
		}
	case *pflag.ValueRequiredError:
		text = err.Error()
	case *pflag.InvalidValueError:
		kind := err.GetFlag().Value.Type()
		wanted := map[string]string{"duration": "a duration such as 30s", "int": "a number", "bool": "no value, or true or false after a ="}[kind]
		if _, failed := time.ParseDuration(err.GetValue() + "s"); failed == nil && kind == "duration" {
			wanted = "a duration such as " + err.GetValue() + "s"
		}
		text = fmt.Sprintf("--%s: want %s", err.GetFlag().Name, wanted)
	}
	return usageError("%s; %q lists the flags", text, c.CommandPath()+" -h")
}

// didYouMean names the commands below c that may have been meant.
func didYouMean(c *cobra.Command, name, dashes string) string {
	names := c.SuggestionsFor(name)
	if len(names) == 0 {
		return ""
	}
	return " (did you mean " + dashes + strings.Join(names, " or "+dashes) + "?)"
}

// checkNumbers refuses numbers and durations that no flag may have.
func checkNumbers(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		d, _ := flags.GetDuration(f.Name)
		if n, _ := flags.GetInt(f.Name); n < 0 || d < 0 {
			err = usageError("--%s %v is negative", f.Name, f.Value)
		}
		if d > 0 && d < objects.ShortestDuration {
			err = usageError("--%s: want at least %v", f.Name, objects.ShortestDuration)
		}
	})
	return err
}

// noArguments is for a command that takes flags only.
func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError("unexpected argument %s", quoted(args[0]))
	}
	return nil
}

// givenAgain returns the flags that were given, quoted for a shell.
func givenAgain(flags *pflag.FlagSet, names ...string) string {
	var again strings.Builder
	for _, name := range names {
		if f := flags.Lookup(name); f != nil && f.Value.String() != "" {
			fmt.Fprintf(&again, " --%s '%s'", name, strings.ReplaceAll(f.Value.String(), "'", `'\''`))
		}
	}
	return again.String()
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

var harmless = regexp.MustCompile(`^[A-Za-z0-9._+/-]*$`)

// findProgram returns an error if a program can't be run.
func findProgram(name string) error {
	_, err := exec.LookPath(name)
	if err == nil {
		return nil
	}
	for errors.Unwrap(err) != nil { // those around it have the name
		err = errors.Unwrap(err)
	}
	return usageError("no program %s: %v", quoted(name), err)
}

type errUsage struct{ error }

func (e errUsage) Unwrap() error { return e.error }

// exitStatus is the error of a command that exits with a status of its own, for example
// that of the program it ran, and prints nothing.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// exit reports an error of a command and returns the exit status for it.
func (o *output) exit(command string, err error) int {
	if err == nil {
		return 0
	}
	if status := exitStatus(0); errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(o.stderr, "%s: %s\n", command, packageName.ReplaceAllString(oneLine(err), ""))
	if errors.As(err, new(errUsage)) {
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
