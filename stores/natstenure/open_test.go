package natstenure_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

func TestAURLThatCannotBeIsRefusedBeforeAnyConnectionAndNotQuoted(t *testing.T) {
	nothing := filepath.Join(t.TempDir(), "nothing")
	require.NoError(t, os.WriteFile(nothing, nil, 0o600))
	for url, want := range map[string]string{
		"":                                  "nats:// or tls://",
		"etcd://app:s3cret@h":               "nats:// or tls://",
		"nats://app:s3/cret@h":              "%XX",
		"nats://app:s3cret@h/path":          "?stream=NAME",
		"nats://h/?table=s3cret":            `a parameter "table"; nats: URLs have stream, bucket,`,
		"nats://h/?bucket=a&stream=b":       "both set",
		"nats://h/?bucket=a.b":              "letters, digits",
		"nats://h/?stream=a.b":              "not one token",
		"nats://h/?replicas=0":              "from 1 to 5",
		"nats://h/?replicas=6":              "between 1 and 5",
		"nats://h/?replicas=3x":             "from 1 to 5",
		"nats://h/?sync=2m":                 "sync=2m of the URL is not always",
		"nats://h/?tls=yes":                 "tls=yes of the URL is not required",
		"nats://h/?creds=/missing":          "creds of the URL: open /missing: no such file",
		"nats://h/?nkey=" + nothing:         "no seed",
		"nats://h/?ca=" + nothing:           "has no certificate",
		"nats://h/?cert=/missing":           "needs key",
		"nats://h/?cert=/missing&key=/none": "cert and key of the URL",
	} {
		_, err := natstenure.Open(t.Context(), url, natstenure.Config{}, dialsNothing(t))
		require.ErrorIs(t, err, tenure.ErrInvalid, url)
		require.ErrorContains(t, err, want, url)
		require.NotContains(t, err.Error(), "s3cret", url)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := natstenure.Open(ended, "nats://h", natstenure.Config{}, dialsNothing(t))
	require.ErrorIs(t, err, context.Canceled)
}

// dialsNothing returns an option that fails the test if a connection is attempted.
func dialsNothing(t *testing.T) nats.Option {
	return nats.SetCustomDialer(dialer{t})
}

type dialer struct{ t *testing.T }

func (d dialer) Dial(_, address string) (net.Conn, error) {
	d.t.Errorf("a connection to %s was attempted", address)
	return nil, net.ErrClosed
}

// lines is a log.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func TestAServerThatRefusesTheClientIsNotJustDown(t *testing.T) {
	t.Parallel()
	address := startWith(t, &server.Options{JetStream: true, Username: "app", Password: "s3cret"}).Addr().String()
	for access, refused := range map[string]bool{"app:s3cret@": false, "app:s3cret2@": true, "s3cret2@": true, "": true} {
		store, err := natstenure.Open(t.Context(), "nats://"+access+address, natstenure.Config{Logger: testkit.Quiet})
		if !refused {
			require.NoError(t, err, access)
			require.Equal(t, "stream TENURE on "+address, fmt.Sprint(store))
			require.NoError(t, store.Close())
			require.NoError(t, store.Close())
			continue
		}
		require.ErrorIs(t, err, tenure.ErrSetup, access)
		require.ErrorContains(t, err, address)
		require.NotContains(t, err.Error(), "s3cret")
	}
	for _, url := range []string{"nats://app:s3cret@" + address + "/?tls=required", "tls://app:s3cret@" + address} {
		_, err := natstenure.Open(t.Context(), url, natstenure.Config{Logger: testkit.Quiet})
		require.ErrorIs(t, err, nats.ErrSecureConnWanted, "the server has no TLS")
		require.ErrorIs(t, err, tenure.ErrSetup)
	}
	_, err := natstenure.Open(t.Context(), "nats://127.0.0.1:1", natstenure.Config{})
	require.ErrorIs(t, err, nats.ErrNoServers)
	require.NotErrorIs(t, err, tenure.ErrSetup)
}

func TestOpenWaitsForASilentServerNoLongerThanItsContext(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = natstenure.Open(ctx, "nats://"+silent.Addr().String(), natstenure.Config{}, nats.Timeout(time.Minute))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestParametersOfAURLAreTheConfig(t *testing.T) {
	t.Parallel()
	address := start(t).Addr().String()
	logged := make(lines, 16)
	for _, test := range []struct {
		parameters string
		is         string
		warns      bool
	}{
		{"?stream=A&replicas=1&sync=always", "stream A", false},
		{"?bucket=B&sync=always", "bucket B", false},
		{"?replicas=1", "stream TENURE", true},
	} {
		store, err := natstenure.Open(t.Context(), "nats://"+address+"/"+test.parameters, natstenure.Config{Logger: slog.New(slog.NewTextHandler(logged, nil))})
		require.NoError(t, err)
		require.NoError(t, store.Migrate(t.Context()))
		require.Equal(t, test.is+" on "+address, store.String())
		require.NoError(t, store.Close())
		require.Len(t, logged, map[bool]int{true: 1}[test.warns])
	}
	require.Contains(t, <-logged, "add sync=always to the parameters of the store's URL")
}

// The server does not answer a request that it does not permit, but reports the reason on the
// connection.
func TestAPermissionThatIsMissingIsNamed(t *testing.T) {
	t.Parallel()
	s := startWith(t, &server.Options{JetStream: true, Users: []*server.User{{
		Username: "guest", Password: "s3cret",
		Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"$JS.API.STREAM.>"}}},
	}}})
	store, err := natstenure.Open(t.Context(), "nats://guest:s3cret@"+s.Addr().String(), natstenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = store.Get(ctx, tenure.Key{Type: "widget", ID: "a"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, `Permissions Violation for Publish to "$JS.API.STREAM.`)
}

func TestAnObjectThatWasDeletedHasExisted(t *testing.T) {
	t.Parallel()
	store := open(t, start(t).ClientURL())
	a, b := tenure.Key{Type: "widget", ID: "a"}, tenure.Key{Type: "widget", ID: "b"}
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: a}, tenure.IfAbsent())
	require.NoError(t, err)
	for _, deleted := range []bool{false, true} {
		if deleted {
			require.NoError(t, store.DeleteIf(t.Context(), a, tenure.IfVersion(obj.Version)))
		}
		for key, want := range map[tenure.Key]bool{a: true, b: false} {
			known, err := store.EverExisted(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, want, known)
		}
	}
}
