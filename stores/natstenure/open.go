package natstenure

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Open returns a store on a connection of its own, which [Store.Close] closes. The URL is
// nats://host:port,host:port or, with TLS required, tls://…, with user:password@ or token@
// before the hosts, and with these parameters after /? as in ?stream=NAME&sync=always:
//
//	stream, bucket, replicas  as in Config
//	sync=always               Config.SyncAlways
//	creds, nkey               a file of credentials, or of an nkey's seed
//	ca, cert, key             PEM files, which require TLS, see [storekit.URL.TLS]
//	tls=required              TLS, as with tls://
//
// The URL takes precedence over the Config, and the options take precedence over the URL. Unless
// the options say otherwise, the client keeps trying to reconnect. Open returns [tenure.ErrInvalid]
// before it connects, and [tenure.ErrSetup] if a server refuses the client. Call [Store.Migrate]
// before the first use.
func Open(ctx context.Context, url string, cfg Config, options ...nats.Option) (*Store, error) {
	store, err := open(ctx, url, cfg, options)
	if err != nil {
		return nil, fmt.Errorf("natstenure: open: %w", err)
	}
	return store, nil
}

func open(ctx context.Context, text string, cfg Config, options []nats.Option) (*Store, error) {
	u, err := storekit.ParseURL(text, []string{"nats", "tls"}, []string{"stream", "bucket", "replicas", "sync", "creds", "nkey", "tls", "ca", "cert", "key"})
	if err != nil {
		return nil, err
	}
	access, err := cfg.take(u)
	if err == nil {
		cfg, err = cfg.withDefaults()
	}
	if err := cmp.Or(err, ctx.Err()); err != nil {
		return nil, err
	}
	reports := &reports{log: cfg.Logger}
	nc, err := connect(ctx, "nats://"+strings.Join(u.Hosts, ",nats://"), slices.Concat(reports.options(), []nats.Option{
		nats.MaxReconnects(-1),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.IgnoreAuthErrorAbort(), // the server may learn of new users after this process has their credentials
		nats.PingInterval(2 * time.Second),
	}, access, options))
	if err != nil {
		hosts := strings.Join(u.Hosts, ",")
		if isRefusal(err) {
			return nil, fmt.Errorf("%w: NATS at %s and this client do not accept each other: check its credentials and TLS (%w)", tenure.ErrSetup, hosts, err)
		}
		return nil, fmt.Errorf("no connection to NATS at %s: %w", hosts, err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	store, err := newStore(js, cfg)
	if err != nil {
		nc.Close()
		return nil, err
	}
	store.reports = reports
	return store, nil
}

// connect is [nats.Connect] for a caller that waits no longer than ctx.
func connect(ctx context.Context, servers string, options []nats.Option) (*nats.Conn, error) {
	type result struct {
		nc  *nats.Conn
		err error
	}
	connected := make(chan result, 1)
	go func() {
		nc, err := nats.Connect(servers, options...)
		connected <- result{nc, err}
	}()
	select {
	case r := <-connected:
		return r.nc, r.err
	case <-ctx.Done():
		go func() {
			if r := <-connected; r.err == nil {
				r.nc.Close()
			}
		}()
		return nil, ctx.Err()
	}
}

// take applies the parameters of the URL to the config, and returns client options for the rest.
func (cfg *Config) take(u storekit.URL) (access []nats.Option, err error) {
	invalid := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", tenure.ErrInvalid, fmt.Sprintf(format, args...))
	}
	is := u.Parameters
	if u.Path != "" {
		return nil, invalid("the URL has a path after the host: the stream is a parameter, as in ?stream=NAME")
	}
	if is["stream"] != "" || is["bucket"] != "" {
		cfg.Stream, cfg.Bucket = is["stream"], is["bucket"]
	}
	if text := is["replicas"]; text != "" {
		if cfg.Replicas, err = strconv.Atoi(text); err != nil || cfg.Replicas < 1 {
			return nil, invalid("replicas=%s of the URL is not a number from 1 to 5", text)
		}
	}
	for name, only := range map[string]string{"sync": "always", "tls": "required"} {
		if value := is[name]; value != "" && value != only {
			return nil, invalid("%s=%s of the URL is not %s", name, value, only)
		}
	}
	cfg.SyncAlways = cfg.SyncAlways || is["sync"] != ""

	secure, err := u.TLS()
	if err != nil {
		return nil, err
	}
	if secure == nil && (u.Scheme == "tls" || is["tls"] != "") {
		secure = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if secure != nil {
		access = append(access, nats.Secure(secure))
	}
	if u.User != nil {
		if password, ok := u.User.Password(); ok {
			access = append(access, nats.UserInfo(u.User.Username(), password))
		} else {
			access = append(access, nats.Token(u.User.Username()))
		}
	}
	// The client reads these files again whenever it connects, and the working directory may change.
	for _, name := range []string{"creds", "nkey"} {
		if is[name] != "" {
			if is[name], err = filepath.Abs(is[name]); err != nil {
				return nil, invalid("%s of the URL: %v", name, err)
			}
		}
	}
	if file := is["creds"]; file != "" {
		if _, err := os.ReadFile(file); err != nil {
			return nil, invalid("creds of the URL: %v", err)
		}
		access = append(access, nats.UserCredentials(file))
	}
	if file := is["nkey"]; file != "" {
		option, err := nats.NkeyOptionFromSeed(file)
		if err != nil {
			return nil, invalid("nkey of the URL: %s has no seed of an nkey", file)
		}
		access = append(access, option)
	}
	return access, nil
}

// isRefusal reports whether a connection failed for a reason that waiting does not fix.
func isRefusal(err error) bool {
	return errors.As(err, new(*tls.CertificateVerificationError)) ||
		slices.ContainsFunc([]error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired,
			nats.ErrSecureConnRequired, nats.ErrSecureConnWanted, nats.ErrNkeysNotSupported}, func(refusal error) bool { return errors.Is(err, refusal) })
}

// reports keeps the last error that NATS reported on the connection instead of in an answer,
// because a server does not answer a request that it does not permit. A nil *reports has no errors.
type reports struct {
	log *slog.Logger

	mu   sync.Mutex
	last error
}

func (r *reports) options() []nats.Option {
	return []nats.Option{
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { r.note(err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: Close
				r.note(fmt.Errorf("the connection broke: %w", err))
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			r.note(nil)
			r.log.Info("reconnected to NATS", "server", nc.ConnectedAddr())
		}),
	}
}

// note keeps an error, and logs it unless it repeats the last one. Nil means that all is well.
func (r *reports) note(err error) {
	r.mu.Lock()
	again := r.last != nil && err != nil && r.last.Error() == err.Error()
	r.last = err
	r.mu.Unlock()
	if err != nil && !again {
		r.log.Warn("NATS reports an error", "error", err)
	}
}

// explain adds the last report to an error that is not an answer from the server.
func (r *reports) explain(err error) error {
	if r == nil || err == nil || storekit.Refusal(err) || errors.As(err, new(*jetstream.APIError)) || errors.As(err, new(*nats.APIError)) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last != nil {
		err = fmt.Errorf("%w (%v)", err, r.last)
	}
	return err
}

// String names the stream, and the servers that the client was given.
func (s *Store) String() string {
	hosts := slices.DeleteFunc(s.nc.Servers(), func(server string) bool { return slices.Contains(s.nc.DiscoveredServers(), server) })
	for i, server := range hosts {
		_, hosts[i], _ = strings.Cut(server, "://")
	}
	slices.Sort(hosts)
	if s.cfg.Bucket != "" {
		return "bucket " + s.cfg.Bucket + " on " + strings.Join(hosts, ",")
	}
	return "stream " + s.cfg.Stream + " on " + strings.Join(hosts, ",")
}
