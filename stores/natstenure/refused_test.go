package natstenure_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// Credentials are replaced on the server first. A client without IgnoreAuthErrorAbort gives up for good when it has
// been refused twice.
func TestAMomentOfRefusedCredentialsIsSurvivedOrTold(t *testing.T) {
	t.Parallel()
	for _, patient := range []bool{true, false} {
		opts := &server.Options{JetStream: true, Username: "app", Password: "first"}
		s := startWith(t, opts)
		options := []nats.Option{nats.UserInfo("app", "first")}
		if patient {
			options = append(options, nats.IgnoreAuthErrorAbort())
		}
		js := connect(t, s.ClientURL(), options...)
		c, err := tenure.NewCoordinator(testkit.NewLease(t, openOn(t, js, natstenure.Config{}), tenure.LeaseConfig{TTL: 3 * time.Second}), tenure.CoordinatorConfig{Logger: testkit.Quiet})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		testkit.Await(t, "it holds", c.IsHolder)

		reload := func(password string) {
			changed := opts.Clone()
			changed.Port, changed.Password = s.Addr().(*net.TCPAddr).Port, password
			require.NoError(t, s.ReloadOptions(changed))
		}
		reload("second")
		if patient {
			testkit.Await(t, "it is refused", func() bool { return !c.IsHolder() })
			require.NoError(t, c.Healthy(time.Second))
			reload("first")
			testkit.Await(t, "it holds again", c.IsHolder)
			cancel()
			require.NoError(t, <-done)
			continue
		}
		testkit.Await(t, "its client has given up", js.Conn().IsClosed)
		reload("first")
		testkit.Await(t, "it is unhealthy", func() bool { return c.Healthy(time.Second) != nil })
		require.ErrorIs(t, c.Healthy(time.Second), tenure.ErrClosed)
		err = <-done
		require.ErrorIs(t, err, tenure.ErrClosed)
		require.ErrorContains(t, err, "IgnoreAuthErrorAbort")
	}
}
