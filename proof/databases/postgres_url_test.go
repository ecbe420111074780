package databases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/testkit"
)

// brokenURLs are connection strings that cannot be parsed, or name what is not there,
// by the secret that is in each.
func brokenURLs(secret string) (urls []string) {
	for _, password := range []string{
		"password=%s", "password = %s", "PASSWORD=%s", "Password\t=\n%s", "password='%s'", "password= 'a %s'", `password='a\'%s'`,
		`password=a\ %s`, "password=a %s", "password='a' %s", "password=%s'", "password='%s", "sslpassword=%s", "sslpassword = '%s'",
	} {
		password := fmt.Sprintf(password, secret)
		for _, form := range []string{
			"host=db %s port=x", "%s port=x host=db", "%s", "host=db %s nothing", "nothing %s", "host=db %s sslmode=maybe", "host=db %s connect_timeout=soon",
			"%s pool_max_conns=0", "%s pool_max_conns=many", "%s target_session_attrs=none", "%s host='db", "=%s", "%s service=none",
			"mysql://h/db?%s", "postgres:/h?%s",
		} {
			urls = append(urls, fmt.Sprintf(form, password))
		}
	}
	for _, form := range []string{
		"postgres://u:%s@host:port/db", "postgres://u:%s/@host/db", "postgres://u:1/%s@host/db", "postgres://u:a@%s@host/db", "postgres://u:%s%%@host/db",
		"postgres://u:1?%s@host:x/db", "postgres://host:x/db?password=%s", "postgres://host/db?pass%%77ord=%s&sslmode=maybe", "postgres://host/db?PASSWORD=%s&password",
		"postgresql://[u:%s@host/db", "POSTGRES://u:%s@host/db", "postgres:u:%s@host/db", "http://u:%s@host/db", "u:%s@host/db", "//u:%s@host/db", "postgres://%s:port@",
		"postgres://u:[%s]@host:port/db", "postgres://u:a@%s?b=c@host/db", "postgres://u:a@b?c=%s@host:port/db", "postgres://u:a@b?c=d&e=%s@host/db?sslmode=disable", "postgres://u:%s@host:1,other:2,third/db", "jdbc:postgresql://h/db?user=u&password=%s",
	} {
		urls = append(urls, fmt.Sprintf(form, secret))
	}
	return urls
}

func TestNoErrorOfAConnectionStringShowsItsPassword(t *testing.T) {
	const secret = "sEcrEt"
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // those that parse are not to be connected to
	for _, url := range brokenURLs(secret) {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, nil))
		_, err := tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: logger})
		if err == nil || strings.Contains(fmt.Sprintf("%v %+v %q", err, err, err), secret) {
			t.Errorf("%s: as a URL: %v", url, err)
		}
		if errors.As(err, new(*pgconn.ParseConfigError)) {
			t.Errorf("%s: the driver's error, which holds the string, can be reached", url)
		}
		_, err = tenure.OpenPostgres(ctx, "postgres://127.0.0.1:1/none", tenure.PostgresConfig{ListenURL: url, Logger: logger})
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: as a ListenURL: %v", url, err)
		}
		cfg := tenure.PostgresConfig{ListenURL: url, Logger: logger}
		pool := testkit.PostgresPool(t, "postgres://127.0.0.1:1/none")
		store, err := tenure.NewPostgresStore(pool, cfg)
		if err == nil {
			_, err = store.Get(ctx, testkit.LeaseKey)
			store.Close()
		}
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: as a ListenURL of a pool: %v", url, err)
		}
		pool.Close()
		logger.Info("a config", "config", cfg)
		logger.Info(fmt.Sprintf("%v %+v", cfg, cfg))
		if strings.Contains(log.String(), secret) {
			t.Errorf("%s: logged:\n%s", url, &log)
		}
	}
}

// Errors of the connection would name the host and the database.
func TestAConnectionStringWhosePasswordHasBecomeSomethingElseIsRefused(t *testing.T) {
	for _, url := range []string{
		"postgres://u:a@b@host/db", "postgresql://u:a@b@host:1,other:2/db", "postgres://u:1/a@host/db", "postgres://u/1:a@host/db",
		"postgres://host/a@b?sslmode=disable", "postgres://u:1/a?b@host=c", "postgres://u:a@b?c=d@host/db", "postgres://u:a@b?host=c@d/db", "host=db password=a b@c=d",
	} {
		if _, err := pgconns.ParseURL(url); err == nil {
			t.Errorf("%s is accepted", url)
		}
	}
}

func FuzzNoErrorOfAConnectionStringShowsAnythingOfIt(f *testing.F) {
	const secret = "sEcrEt"
	for _, url := range brokenURLs(secret) {
		before, after, _ := strings.Cut(url, secret)
		f.Add(before, after)
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		if _, err := pgconns.ParseURL(before + secret + after); err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%q, %q: %v", before, after, err)
		}
	})
}

func TestAPasswordOfAnyCharactersIsAcceptedAsItIsMeantToBeWritten(t *testing.T) {
	for _, url := range []string{
		"postgres://u:a%40b%2Fc@host/db", "postgres://user@tenant:p@host/db?application_name=a@b", "postgres://host/db?user=u@v&password=a@b&options=-c%20search_path%3Dx", `host=h password='a@b \' c' dbname=a@b user=u@v`,
		"postgres://host/a%40b", "postgres://[::1]:5432,other:1/db",
	} {
		if _, err := pgconns.ParseURL(strings.Replace(url, "user@tenant", "user%40tenant", 1)); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}
