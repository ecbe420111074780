package databases_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// beforeLineages is the last commit whose library knows nothing of lineages.
const beforeLineages = "929ca207^"

// olderCommand builds the command of that commit.
func olderCommand(t *testing.T) (program string) {
	t.Helper()
	dir := t.TempDir()
	tree, err := exec.Command("git", "-C", "../..", "archive", beforeLineages).Output()
	if err != nil {
		t.Skip("there is no history of this repository: ", err)
	}
	unpack := exec.Command("tar", "-x", "-C", dir)
	unpack.Stdin = bytes.NewReader(tree)
	out, err := unpack.CombinedOutput()
	require.NoError(t, err, "%s", out)
	program = filepath.Join(dir, "older")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = filepath.Join(dir, "cmd/tenure")
	out, err = build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// While a service is updated, replicas of both libraries use one table. Over a failover the older ones are no safer than
// they were; but they give the lease to newer ones, and take it from them, and neither sees an error.
func TestAnOlderLibraryGoesOnBesideThisOne(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the older library")
	}
	t.Parallel()
	older := olderCommand(t)
	for _, lost := range []string{"old", "new"} { // whose term a failover loses
		t.Run(lost, func(t *testing.T) {
			t.Parallel()
			f := &failover{T: t, primary: testkit.StartPostgres(t)}
			out, err := exec.Command(older, "migrate", "-store", f.primary.URL()).CombinedOutput()
			require.NoError(t, err, "%s", out)
			f.standby = testkit.Must(f.primary.Standby())
			t.Cleanup(func() { _ = f.standby.Close() })

			var logs testkit.SyncBuffer // of both
			logger := slog.New(slog.NewTextHandler(&logs, nil))
			reach := func() (string, *rig.Proxy) {
				proxy, err := rig.NewProxy(addressOf(t, f.primary), nil)
				require.NoError(t, err)
				t.Cleanup(proxy.Close)
				u := testkit.Must(url.Parse(f.primary.URL()))
				u.Host = proxy.Addr()
				return u.String(), proxy
			}
			at, toOld := reach()
			run := exec.Command(older, "run", "-store", at, "-key", testkit.LeaseKey.ID, "-replica", "old", "-ttl", failoverTTL.String(), "--", "sleep", "1000")
			run.Stderr = &logs
			require.NoError(t, run.Start())
			t.Cleanup(func() { _ = run.Process.Signal(os.Interrupt); _ = run.Wait() })
			at, toNew := reach()
			store := testkit.OpenPostgres(t, at, tenure.PostgresConfig{Logger: logger})
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "new", TTL: *failoverTTL, Logger: logger})
			coordinator := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: (&testkit.Jobs{}).Run, Logger: logger}))
			testkit.RunCoordinator(t, t.Context(), coordinator)

			holds := func() string {
				if coordinator.IsHolder() {
					return "new"
				}
				is, err := lease.Read(t.Context())
				if err != nil || is.Age > *failoverTTL {
					return ""
				}
				return is.Holder
			}
			handOver := func(to string) {
				testkit.Await(t, "handed over to "+to, func() bool {
					if holds() == to {
						return true
					}
					if to == "old" {
						_ = lease.RequestHandover(t.Context(), to)
					} else {
						_ = exec.Command(older, "handover", "-store", at, "-key", testkit.LeaseKey.ID, "-to", to).Run()
					}
					testkit.Sleep(t.Context(), time.Second)
					return holds() == to
				})
			}
			wantQuiet := func(since int) { // but for what a busy machine does
				t.Helper()
				for line := range strings.Lines(logs.String()[since:]) {
					slow := strings.Contains(line, context.DeadlineExceeded.Error()) || strings.Contains(line, tenure.ErrDeadline.Error()) || strings.Contains(line, "canceling statement")
					require.False(t, !slow && (strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR")), line)
				}
			}
			other := map[string]string{"old": "new", "new": "old"}[lost]
			for range 2 {
				handOver(lost)
				handOver(other)
			}
			wantQuiet(0)
			f.awaitStandby()
			f.lag()
			handOver(lost)
			require.NoError(t, f.primary.Stop("immediate"))
			require.NoError(t, f.standby.Promote())
			toOld.Redirect(addressOf(t, f.standby))
			toNew.Redirect(addressOf(t, f.standby))
			testkit.Await(t, "somebody holds", func() bool { return holds() != "" })
			handOver(other) // whoever has kept it
			handOver(lost)
			settled := len(logs.String())
			handOver(other)
			handOver(lost)
			wantQuiet(settled)
			for _, wrong := range []string{"level=ERROR", "panic", tenure.ErrSetup.Error()} {
				require.False(t, strings.Contains(logs.String(), wrong), "%s in:\n%s", wrong, logs.String())
			}
		})
	}
}
