{{- define "longreach.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What finds the pods of one component: {root, component}. */}}
{{- define "longreach.selector" -}}
app.kubernetes.io/name: longreach
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "longreach.labels" -}}
{{ include "longreach.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "longreach.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ printf "%s@%s" .repository .digest }}
{{- else -}}
{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "longreach.claim" -}}
{{- $volume := get .root.Values .name -}}
{{- $volume.existingClaim | default (printf "%s-%s" (include "longreach.fullname" .root) .name) -}}
{{- end -}}

{{/* Whether models lie on a volume: "true" or nothing. */}}
{{- define "longreach.hasModel" -}}
{{- if or .Values.model.id .Values.model.path -}}true{{- end -}}
{{- end -}}

{{- define "longreach.fetches" -}}
{{- if and .Values.model.id .Values.fetch.enabled -}}true{{- end -}}
{{- end -}}

{{- define "longreach.severalPods" -}}
{{- if or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* The file that is there once the model is: one for each model, revision and tokenizer. */}}
{{- define "longreach.fetchedMark" -}}
{{- $what := list .Values.model.id .Values.model.revision (get .Values.settings "tokenizer" | default "") -}}
/models/hub/.fetched-{{ $what | join "@" | sha256sum | trunc 12 }}
{{- end -}}

{{/* A value as a variable's text. Helm reads whole numbers as floats. */}}
{{- define "longreach.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- else if kindIs "map" . -}}
{{ toJson . }}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end -}}

{{/* The model, as the server and the Job are told of it. */}}
{{- define "longreach.modelEnv" -}}
{{- with .Values.model.id | default .Values.model.path }}
- name: LONGREACH_MODEL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.model.revision }}
- name: LONGREACH_REVISION
  value: {{ . | quote }}
{{- end }}
{{- if .Values.model.id }}
- name: HF_HOME
  value: /models/hub
{{- end }}
{{- end -}}

{{/* What the server is told beside its keys. */}}
{{- define "longreach.engineEnv" -}}
{{- include "longreach.modelEnv" . }}
{{- if include "longreach.hasModel" . }}
# Nobody outside can be asked, and nobody is.
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- $several := gt (int .Values.gpu.count) 1 }}
{{- if and $several (not (or (hasKey .Values.settings "tensor_parallel_size") (hasKey .Values.settings "context_parallel_size"))) }}
- name: LONGREACH_TENSOR_PARALLEL_SIZE
  value: {{ .Values.gpu.count | quote }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: LONGREACH_{{ $name | upper }}
  value: {{ include "longreach.text" $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "longreach.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "longreach.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What all pods of the chart have in common. */}}
{{- define "longreach.pod" -}}
# A service called longreach would give this pod variables that look like settings.
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  {{- include "longreach.podSecurity" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where servers go. */}}
{{- define "longreach.placement" -}}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $.Values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "longreach.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits .Values.gpu.resource (int .Values.gpu.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Waits until the Job has fetched the model; reads a volume and no more. */}}
{{- define "longreach.waitForModel" -}}
{{- if include "longreach.fetches" . }}
initContainers:
  - name: wait-for-model
    image: {{ include "longreach.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command:
      - sh
      - -c
      - until [ -e {{ include "longreach.fetchedMark" . }} ]; do echo waiting for the model; sleep 5; done
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext:
      {{- include "longreach.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "longreach.mounts" -}}
- {name: cache, mountPath: /var/cache/longreach}
- {name: shm, mountPath: /dev/shm}
{{- if include "longreach.hasModel" . }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "longreach.volumes" -}}
- name: cache
  {{- if .Values.cache.persistence }}
  persistentVolumeClaim: {claimName: {{ include "longreach.claim" (dict "root" . "name" "cache") }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
  {{- end }}
# CUDA's libraries share memory between processes here; the runtime's 64 MB are few.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- if include "longreach.hasModel" . }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "longreach.claim" (dict "root" . "name" "models") }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Values that are valid one by one, and together make no deployment that works. */}}
{{- define "longreach.check" -}}
{{- $v := .Values -}}
{{- $shared := or (include "longreach.severalPods" .) (eq $v.strategy "RollingUpdate") -}}
{{- if and $v.model.id $v.model.path -}}
{{- fail "model: give id or path, not both" -}}
{{- end -}}
{{- if and $v.model.revision (not $v.model.id) -}}
{{- fail "model.revision is a revision of model.id, which is empty" -}}
{{- end -}}
{{- if and (include "longreach.severalPods" .) $v.data.enabled -}}
{{- fail "data.enabled: servers do not share documents, responses and pages on disk; set replicas=1 and autoscaling.enabled=false, or data.enabled=false" -}}
{{- end -}}
{{- range $name := list "cache" "models" -}}
{{- $volume := get $v $name -}}
{{- $there := ternary $v.cache.persistence (include "longreach.hasModel" $) (eq $name "cache") -}}
{{- if and $shared $there (not $volume.existingClaim) (not (has "ReadWriteMany" $volume.accessModes)) -}}
{{- fail (printf "%s.accessModes: pods on several nodes mount this volume; set [ReadWriteMany]%s" $name (ternary ", or cache.persistence=false" "" (eq $name "cache"))) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "documents" "responses_store" "kv_disk" -}}
{{- if and (hasKey $v.settings $name) (not $v.data.enabled) -}}
{{- fail (printf "settings.%s: files that outlive the server need data.enabled=true, and a place below /data" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled $v.auth.enabled (not $v.serviceMonitor.tokenSecret.name) -}}
{{- fail "serviceMonitor.tokenSecret.name: /metrics asks for a key; name the secret that has one, by itself" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway, for example [{name: gateway, namespace: infra}]" -}}
{{- end -}}
{{- end -}}
